"""A minimal worker: it joins, meets the others in barriers, writes, counts, and joins again when its generation ends.

It keeps the client's side of the protocol: numbered requests, request ids, resume by token, no requests for former generations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND

from ferrorpc.errors import ErrorCode, GroupAbortedError
from ferrorpc.v1 import barrier_pb2, rendezvous_pb2, session_pb2, store_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.limits import SESSION_PROTOCOL_VERSION

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation, Wire

Then = Callable[[session_pb2.Result], None]


class Process:
    """One process, from its start to its end."""

    def __init__(self, simulation: Simulation, name: str, instance: int) -> None:
        self.simulation = simulation
        self.name = name
        self.instance = f"{name}/{instance}"
        self.who = ""
        """name#incarnation, once it is known."""
        self.alive = True
        self.frozen = False
        self.backlog: list[Callable[[], None]] = []
        self.wire: Wire | None = None
        self.token = ""
        self.generation = 0
        self.rank = -1
        self.size = 0
        self.joining = False
        self.sequence = 0
        self.requests = 0
        self.version = 0
        self.pending: dict[int, tuple[session_pb2.ClientFrame, Then]] = {}
        self.ordinal = 0
        self.barriers_met = 0
        self.met_in = 0
        """The generation the last barrier was met in."""
        self.busy = False
        self.connect()
        self._beat()

    # -- line ----------------------------------------------------------------------------------------------------------

    def awake(self, action: Callable[[], None]) -> None:
        """Runs an action now, when the process thaws, or never if it has ended."""
        if not self.alive:
            return
        if self.frozen:
            self.backlog.append(action)
        else:
            action()

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """Runs an action after a delay, if the process is still there then."""
        self.simulation.after(delay, lambda: self.awake(action))

    def connect(self) -> None:
        """Dials, and dials again while nobody answers."""
        if self.wire is not None:
            return
        hello = session_pb2.Hello(
            protocol_version=SESSION_PROTOCOL_VERSION,
            job="job",
            name=self.name,
            instance_id=self.instance,
            host=f"host-{self.name}",
            resume_token=self.token,
        )
        self.wire = self.simulation.dial(self, hello)
        if self.wire is None:
            self.later(self.simulation.random.randint(100, 900) * MILLISECOND, self.connect)

    def line_ended(self, wire: Wire) -> None:
        """The stream broke, or was closed."""
        if self.wire is wire:
            self.wire = None
            self.later(self.simulation.random.randint(10, 700) * MILLISECOND, self.connect)

    def end(self) -> None:
        """The process is no more."""
        self.alive = False
        self.pending.clear()

    def _beat(self) -> None:
        if self.wire is not None and self.token:
            beat = session_pb2.Beat(step=self.barriers_met, generation=self.generation)
            self.simulation.send(self.wire, session_pb2.ClientFrame(beat=beat))
        self.later(SECOND, self._beat)

    def ask(self, then: Then, **body: object) -> None:
        """Sends a numbered request."""
        self.sequence += 1
        frame = session_pb2.ClientFrame(sequence=self.sequence, **body)  # type: ignore[arg-type]
        self.pending[self.sequence] = frame, then
        if self.wire is not None:
            self.simulation.send(self.wire, frame)

    # -- frames --------------------------------------------------------------------------------------------------------

    def receive(self, wire: Wire, frame: session_pb2.ServerFrame) -> None:
        """Handles a frame from the coordinator."""
        if wire is not self.wire:
            return
        self.simulation.checker.position(self.instance, frame.position)
        body = frame.WhichOneof("body")
        if body == "welcome":
            self._welcomed(frame.welcome)
        elif body == "result":
            known = self.pending.pop(frame.result.sequence, None)
            if known is not None:
                known[1](frame.result)
        else:
            self._told(frame.event)

    def _welcomed(self, welcome: session_pb2.Welcome) -> None:
        first = not self.token
        self.token = welcome.resume_token
        self.who = f"{self.name}#{welcome.incarnation}"
        for frame, _ in list(self.pending.values()):
            assert self.wire is not None
            self.simulation.send(self.wire, frame)
        if first:
            self.join()

    def _told(self, event: session_pb2.Event) -> None:
        kind = event.WhichOneof("kind")
        if kind == "fenced":
            if event.fenced.retryable and not self.token and event.fenced.code != ErrorCode.STALE_GENERATION:
                return
            self.simulation.process_ended(self, "is fenced")
        broken = kind == "broken" and event.broken.generation == self.generation
        room = 0 < self.size < self.simulation.world[1]
        if broken or (kind == "pending" and event.pending.names and room):
            self.join()

    # -- membership ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Asks for a place in the next generation, unless it has asked already."""
        if self.joining:
            return
        self.joining = True
        low, high = self.simulation.world
        request = rendezvous_pb2.JoinRequest(
            policy=rendezvous_pb2.WorldPolicy(min_size=low, max_size=high, last_call_ms=500 if low < high else 0),
            after_generation=self.generation,
            pinned_rank=-1,
            hinted_rank=-1,
            timeout_ms=20_000,
        )
        self.ask(self._joined, join=request)

    def _join_again(self, refused_in: int) -> None:
        """Asks again, unless it was told meanwhile to join and is in another generation than the one it was refused in."""
        if self.generation == refused_in:
            self.join()

    def _joined(self, result: session_pb2.Result) -> None:
        self.joining = False
        if result.WhichOneof("outcome") == "error":
            self.later(200 * MILLISECOND, partial(self._join_again, self.generation))
            return
        before, self.generation, self.rank = self.generation, result.join.generation, result.join.rank
        assert self.generation > before
        self.size = len(result.join.peers)
        self.simulation.checker.joined(self.who, result.join)
        self.ordinal = 0
        if before and self.simulation.random.random() < 0.5:
            self._speak_of(before)
        if not self.busy:
            self.work()

    def _speak_of(self, generation: int) -> None:
        """Sends a late report about a former generation, like a process that was stopped during the change."""
        failure = detail_of(GroupAbortedError(self.rank, "late news"))
        report = session_pb2.ReportRequest(generation=generation, failure=failure)

        def answered(result: session_pb2.Result) -> None:
            self.simulation.checker.stale_request_answered(self.who, generation, result.WhichOneof("outcome") or "")

        self.ask(answered, report=report)

    # -- work ----------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """The next operation, chosen at random; each one calls `work` again when it is answered."""
        self.busy = True
        if self.joining or not self.generation:
            self.busy = False
            return
        chance = self.simulation.random.random()
        if chance < 0.45:
            self._barrier()
        elif chance < 0.65:
            self._write()
        elif chance < 0.85:
            self._count_own()
        elif chance < 0.9:
            self._bind()
        elif chance < 0.98 or self.simulation.healed:
            self._count_shared()
        else:
            self._abort()

    def _again(self) -> None:
        self.later(self.simulation.random.randint(20, 400) * MILLISECOND, self.work)

    def _barrier(self) -> None:
        self.ordinal += 1
        generation, ordinal = self.generation, self.ordinal
        payload = f"{self.who}:{ordinal}".encode()
        self.simulation.checker.arrived(generation, ordinal, self.rank, payload)
        request = barrier_pb2.BarrierRequest(
            generation=generation, name="step", ordinal=ordinal, timeout_ms=6_000, payload=payload
        )

        def answered(result: session_pb2.Result) -> None:
            if result.WhichOneof("outcome") == "barrier":
                self.simulation.checker.barrier_released(self.who, generation, ordinal, result.barrier)
                self.barriers_met += 1
                self.met_in = generation
            elif result.error.code == ErrorCode.BARRIER_TIMEOUT:
                self.simulation.checker.barrier_timed_out(self.who, generation, ordinal)
            elif generation == self.generation:
                self.join()
            self._again()

        self.ask(answered, barrier=request)

    def _request(self, **operation: object) -> store_pb2.StoreRequest:
        self.requests += 1
        return store_pb2.StoreRequest(request_id=self.requests, **operation)  # type: ignore[arg-type]

    def _write(self) -> None:
        self.version += 1
        version, key = self.version, f"own/{self.who}/version"
        operation = store_pb2.SetOperation(key=key, value=str(version).encode())

        def answered(result: session_pb2.Result) -> None:
            assert result.WhichOneof("outcome") == "store", result
            self.simulation.checker.version_acknowledged(key, version, self.simulation.host.rows.get(("store", f"job/{key}")))
            self._again()

        self.ask(answered, store=self._request(set=operation))

    def _count_own(self) -> None:
        operation = store_pb2.AddOperation(key=f"own/{self.who}/count", amount=1)

        def answered(result: session_pb2.Result) -> None:
            self.simulation.checker.own_count(self.who, result.store.number)
            self._again()

        self.ask(answered, store=self._request(add=operation))

    def _count_shared(self) -> None:
        sent = self.simulation.now
        self.simulation.checker.additions_sent += 1
        operation = store_pb2.AddOperation(key="shared", amount=1)

        def answered(result: session_pb2.Result) -> None:
            self.simulation.checker.added(sent, self.simulation.now, result.store.number)
            self._again()

        self.ask(answered, store=self._request(add=operation))

    def report_link(self, peer: int, reason: str) -> None:
        """Reports that the data stream to another rank broke, or that the rank is needed after its goodbye."""
        lost = session_pb2.LinkLost(peer_rank=peer, reason=reason)
        self.ask(lambda result: None, report=session_pb2.ReportRequest(generation=self.generation, link_lost=lost))

    def _bind(self) -> None:
        binding = store_pb2.KEY_BINDING_SESSION
        operation = store_pb2.SetOperation(key=f"seat/{self.who}", value=b"taken", binding=binding)
        self.ask(lambda result: self._again(), store=self._request(set=operation))

    def _abort(self) -> None:
        failure = detail_of(GroupAbortedError(self.rank, "loss is NaN"))
        report = session_pb2.ReportRequest(generation=self.generation, failure=failure)
        self.ask(lambda result: self._again(), report=report)
