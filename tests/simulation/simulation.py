"""One run: a few processes and a coordinator on a virtual clock, with all faults chosen by a seed.

For twenty seconds processes crash, stop, hold their interpreter lock and leave; streams break, are delayed and repeat frames;
the coordinator pauses, is cut off from all processes, and is killed and restarted from what was durable then. Then the faults
end, and within 75 seconds the processes must be in one generation and complete barriers again.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.events import Called, Connected, Disconnected, Received
from ferrorpc_coordinator.state.member import Liveness
from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND, Settings

from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.v1 import session_pb2
from tests.simulation.checker import Checker, Violation
from tests.simulation.host import Host
from tests.simulation.process import Process

FAULTS_NS = 20 * SECOND
HEALING_NS = 75 * SECOND
BARRIERS_TO_MEET = 2


@dataclass(eq=False, slots=True)
class Wire:
    """One stream. Frames keep their order in each direction; `up_at` and `down_at` are the arrival times of the last ones."""

    number: int
    process: Process
    broken: bool = False
    said_hello: bool = False
    """The Hello has reached the coordinator."""
    up_at: int = 0
    down_at: int = 0


class Simulation:
    """A seeded run. `trace` gets a line for every event."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0
        self.healed = False
        self.cut_off = False
        self.checker = Checker()
        self._trace = trace
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._wires: dict[int, Wire] = {}
        self.elastic = self.random.random() < 0.5
        size = self.random.randint(2, 4)
        spares = self.random.choice((0, 0, 1))
        self.world = (max(1, size - self.random.randint(1, 2)), size) if self.elastic else (size, size)
        self.names = [f"p{number}" for number in range(size + spares)]
        self.host = Host(self, Settings(durable=True), self._deliver)
        self.processes: dict[str, Process] = {}

    def note(self, line: Callable[[], str]) -> None:
        """A line for the trace."""
        if self._trace is not None:
            self._trace(f"{self.now / 1e9:9.3f} {line()}")

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Runs an action at a time."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, delay: int, action: Callable[[], None]) -> None:
        """Runs an action after a delay."""
        self.at(self.now + delay, action)

    def run(self) -> None:
        """The whole run.

        Raises:
            Violation: an invariant was broken, or nothing moves on after everything has healed.
        """
        self.note(lambda: f"seed {self.seed}: world {self.world}, processes {self.names}")
        self.host.start()
        for name in self.names:
            self.after(self.random.randint(0, 500) * MILLISECOND, lambda name=name: self._spawn(name))  # type: ignore[misc]
        self.after(self._pause_between_faults(), self._fault)
        self.at(FAULTS_NS, self._heal)
        while self._queue and not (self.healed and self._has_moved_on()):
            self.now, _, action = heapq.heappop(self._queue)
            if self.now > FAULTS_NS + HEALING_NS:
                raise Violation(f"nothing moves on after everything healed: {self._standing()}")
            action()
        self.checker.finished(self.host.rows)

    def _has_moved_on(self) -> bool:
        """Whether enough processes for a world have completed enough barriers in one generation since the faults ended."""
        assert self.host.coordinator is not None or not self.healed or self.now <= FAULTS_NS + HEALING_NS
        newest = max((process.generation for process in self.processes.values()), default=0)
        met = [p for p in self.processes.values() if p.alive and p.met_in == newest and p.barriers_met >= BARRIERS_TO_MEET]
        wanted = min(len(self.names), self.world[1])
        return len(met) >= wanted

    def _standing(self) -> str:
        lines = [
            f"{p.name} alive={p.alive} generation={p.generation} rank={p.rank} joining={p.joining} busy={p.busy} "
            f"met={p.barriers_met} in {p.met_in} pending={sorted(p.pending)}"
            for p in self.processes.values()
        ]
        return "; ".join(lines)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _spawn(self, name: str) -> None:
        self.note(lambda: f"{name} starts")
        self.processes[name] = Process(self, name, next(self._numbers))

    def excuse(self, process: Process) -> None:
        """From now on this process may be declared dead."""
        self.checker.excused.add(process.instance)

    def process_ended(self, process: Process, how: str) -> None:
        """A process ended; after a while another one starts with its name."""
        if not process.alive:
            return
        self.note(lambda: f"{process.who or process.name} {how}")
        self.excuse(process)
        process.end()
        if process.wire is not None:
            self.cut(process.wire)
        delay = self.random.randint(200, 3_000) * MILLISECOND
        self.after(delay, lambda: self._spawn(process.name))

    # -- network -------------------------------------------------------------------------------------------------------

    def dial(self, process: Process, hello: session_pb2.Hello) -> Wire | None:
        """Opens a stream; None if no coordinator can be reached."""
        if not self.host.up or self.cut_off:
            return None
        wire = Wire(next(self._numbers), process)
        self._wires[wire.number] = wire
        copy = session_pb2.Hello.FromString(hello.SerializeToString())

        def say_hello() -> None:
            wire.said_hello = True
            self.host.take(Connected(wire.number, copy))

        self._upwards(wire, say_hello)
        return wire

    def send(self, wire: Wire, frame: session_pb2.ClientFrame) -> None:
        """Sends a frame to the coordinator; sometimes the network duplicates it."""
        for _ in range(2 if not self.healed and self.random.random() < 0.03 else 1):
            copy = session_pb2.ClientFrame.FromString(frame.SerializeToString())
            self._upwards(wire, lambda copy=copy: self.host.take(Received(wire.number, copy)))  # type: ignore[misc]

    def _deliver(self, stream: int, frame: session_pb2.ServerFrame) -> None:
        wire = self._wires.get(stream)
        if wire is None:
            return
        wire.down_at = max(wire.down_at, self.now + self._latency())

        def arrive() -> None:
            if not wire.broken:
                wire.process.awake(lambda: wire.process.receive(wire, frame))

        self.at(wire.down_at, arrive)

    def _upwards(self, wire: Wire, action: Callable[[], None]) -> None:
        wire.up_at = max(wire.up_at, self.now + self._latency())

        def arrive() -> None:
            if not wire.broken:
                action()

        self.at(wire.up_at, arrive)

    def _latency(self) -> int:
        slow = not self.healed and self.random.random() < 0.02
        return (self.random.randint(100, 300) if slow else self.random.randint(1, 8)) * MILLISECOND

    def cut(self, wire: Wire) -> None:
        """A stream breaks; frames under way in either direction are lost. Each side notices a little later."""
        if wire.broken:
            return
        wire.broken = True
        self._noticed(wire)

    def _noticed(self, wire: Wire) -> None:
        self._wires.pop(wire.number, None)
        self.after(self.random.randint(1, 50) * MILLISECOND, lambda: self.host.take(Disconnected(wire.number)))
        noticed = self.random.randint(1, 50) * MILLISECOND
        self.after(noticed, lambda: wire.process.awake(lambda: wire.process.line_ended(wire)))

    def close(self, stream: int) -> None:
        """The coordinator closes a stream, after what it sent on it before."""
        wire = self._wires.get(stream)
        if wire is not None:
            self.at(wire.down_at + MILLISECOND, lambda: self.cut(wire))

    # -- faults --------------------------------------------------------------------------------------------------------

    def _pause_between_faults(self) -> int:
        return self.random.randint(200, 2_000) * MILLISECOND

    def _fault(self) -> None:
        if self.healed:
            return
        self.after(self._pause_between_faults(), self._fault)
        alive = [process for process in self.processes.values() if process.alive]
        if not alive:
            return
        process = self.random.choice(alive)
        faults = (self._blip, self._blip, self._crash, self._stop, self._hold, self._leave, self._partition, self._lose_link)
        kind = self.random.random()
        if kind < 0.15:
            self._pause_coordinator()
        elif kind < 0.3:
            self._kill_coordinator()
        elif kind < 0.36:
            self._cut_coordinator_off()
        else:
            self.random.choice(faults)(process)

    def _blip(self, process: Process) -> None:
        if process.wire is not None:
            self.note(lambda: f"the stream of {process.name} breaks")
            self.cut(process.wire)

    def _partition(self, process: Process) -> None:
        """No frames pass any more; keepalive ends the stream on both sides after a while."""
        wire = process.wire
        if wire is not None and not wire.broken:
            self.note(lambda: f"{process.name} is cut off silently")
            self.excuse(process)
            self._break_silently(wire)

    def _break_silently(self, wire: Wire) -> None:
        wire.broken = True
        self.after(self.random.randint(1_000, 2_500) * MILLISECOND, lambda: self._noticed(wire))

    def _cut_coordinator_off(self) -> None:
        """Its own network fails, for longer than a keepalive needs to end all streams. Processes whose stream broke just before
        and that it has not heard of again may be declared dead."""
        if self.cut_off:
            return
        duration = self.random.randint(2_600, 9_000) * MILLISECOND
        self.note(lambda: f"the coordinator is cut off for {duration / 1e9:.1f} s")
        for process in self.processes.values():
            wire = process.wire
            if wire is None or wire.broken or not wire.said_hello:
                self.excuse(process)
            if wire is not None and not wire.broken:
                self._break_silently(wire)
        self.cut_off = True
        self.after(duration, self._reconnect_coordinator)

    def _reconnect_coordinator(self) -> None:
        self.note(lambda: "the coordinator's network is back")
        self.cut_off = False

    def _lose_link(self, process: Process) -> None:
        """This rank reports that its data stream to another broke, or that it needs one that has said goodbye."""
        if process.generation and not process.joining and process.size > 1:
            peer = (process.rank + 1) % process.size
            reason = self.random.choice(("connection reset", PEER_LEFT))
            self.note(lambda: f"{process.name} lost its link to rank {peer}: {reason or 'its goodbye'}")
            process.report_link(peer, reason)

    def _lose_links_of(self, process: Process) -> None:
        """This process ends, and with it its data streams: another rank reports one, half of the time."""
        generation, rank = process.generation, process.rank
        others = [p for p in self.processes.values() if p is not process and p.alive and p.generation == generation > 0]
        if not others or self.random.random() < 0.5:
            return
        other = self.random.choice(others)

        def report() -> None:
            if other.generation == generation and not other.joining:
                self.note(lambda: f"{other.name} lost its link to rank {rank}, which has ended")
                self.checker.lost_with_peer.add((generation, other.rank, rank))
                other.report_link(rank, "connection reset")

        self.after(self.random.randint(1, 200) * MILLISECOND, lambda: other.awake(report))

    def _crash(self, process: Process) -> None:
        instance = process.instance
        self._lose_links_of(process)
        self.process_ended(process, "crashes")
        if self.random.random() < 0.5:
            ended = session_pb2.ProcessExit(name=process.name, instance_id=instance, returncode=-9)
            report = session_pb2.UnaryReportRequest(job="job", request=session_pb2.ReportRequest(exit=ended))
            call = next(self._numbers)
            self.after(50 * MILLISECOND, lambda: self.host.take(Called(call, report)))

    def _stop(self, process: Process) -> None:
        """SIGSTOP: after 2.5 s keepalive ends the stream at the coordinator."""
        wire = process.wire
        if wire is not None:
            self._freeze(process, "is stopped")
            self.after(2_500 * MILLISECOND, lambda: self.cut(wire) if process.frozen else None)

    def _hold(self, process: Process) -> None:
        """The process holds the interpreter lock: the stream stays open, nothing moves."""
        self._freeze(process, "holds its interpreter lock")

    def _freeze(self, process: Process, how: str) -> None:
        if process.frozen:
            return
        duration = self.random.randint(500, 8_000) * MILLISECOND
        self.note(lambda: f"{process.name} {how} for {duration / 1e9:.1f} s")
        self.excuse(process)
        process.frozen = True
        self.after(duration, lambda: self._thaw(process))

    def _thaw(self, process: Process) -> None:
        self.note(lambda: f"{process.name} goes on")
        process.frozen = False
        backlog, process.backlog = process.backlog, []
        for action in backlog:
            process.awake(action)

    def _leave(self, process: Process) -> None:
        """A clean Leave, but the process does not wait for the answer."""
        if process.wire is None or process.frozen:
            return
        wire = process.wire
        process.ask(lambda result: None, leave={})
        self.excuse(process)
        self.after(30 * MILLISECOND, lambda: self.process_ended(process, "has left"))
        self.note(lambda: f"{process.name} leaves on stream {wire.number}")

    def _pause_coordinator(self) -> None:
        """Half of the time just after a stream broke, so that the process's resume is not read in time."""
        if self.host.up and not self.host.paused:
            wire = self.random.choice(list(self._wires.values()) or [None])
            if wire is not None and self.random.random() < 0.5:
                self.cut(wire)
                self.after(60 * MILLISECOND, self._pause_now)
            else:
                self._pause_now()

    def _pause_now(self) -> None:
        if self.host.up and not self.host.paused:
            longest = self.random.choice((3_000, 6_000, 13_000))
            self.host.pause(self.random.randint(300, longest) * MILLISECOND)

    def _kill_coordinator(self) -> None:
        if not self.host.up:
            return
        self.host.crash()
        for wire in list(self._wires.values()):
            self.cut(wire)
        self.after(self.random.randint(100, 2_000) * MILLISECOND, self.host.start)

    def _heal(self) -> None:
        self.note(lambda: "everything heals")
        self.healed = True
        for process in self.processes.values():
            process.barriers_met = 0

    # -- structure -----------------------------------------------------------------------------------------------------

    def check_structure(self, coordinator: Coordinator) -> None:
        """Invariants of the coordinator's state after each step."""
        for job in coordinator.jobs.values():
            newest = job.generations.newest
            for member in job.members:
                connected = member.liveness in (Liveness.PRESENT, Liveness.STALLED)
                if connected != (member.stream is not None):
                    raise Violation(f"{member} is {member.liveness.value} with stream {member.stream}")
                if member.rank >= 0 and (
                    not newest.number or (newest.number, newest.members[member.rank]) != (member.generation, member)
                ):
                    raise Violation(f"{member} has rank {member.rank}, which is not its own")
            if not newest.over and any(m.liveness is Liveness.DEAD for m in newest.members):
                raise Violation(f"generation {newest.number} goes on with a dead member")
