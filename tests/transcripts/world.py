"""A coordinator with a few clients, in one thread, on a clock that only the test advances.

Clients behave like real ones: they send heartbeats while time passes (unless frozen), number their requests, and after a resume
send unanswered ones again. The journal keeps every row, so `restart` recovers from all of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ferrorpc_coordinator.state.access import Access
from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.effects import Close, Effect, Note, Persist, Reply, Send, UnaryResponse
from ferrorpc_coordinator.state.events import (
    Called,
    Connected,
    Disconnected,
    Event,
    Received,
    Tick,
    UnaryRequest,
)
from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND, Settings

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from ferrorpc.wire.limits import SESSION_PROTOCOL_VERSION

BEAT_NS = SECOND // 2


@dataclass(slots=True)
class Client:
    """One simulated process."""

    name: str
    host: str = ""
    instance: str = "1"
    stream: int | None = None
    token: str = ""
    frozen: bool = False
    over: bool = False
    step: int = 0
    waits: bool = False
    """Whether it spends its time in operations."""
    operation_ms: int = 0
    activity: str = ""
    generation: int = 0
    rank: int = -1
    sequence: int = 0
    request_id: int = 0
    pending: dict[int, session_pb2.ClientFrame] = field(default_factory=dict)
    results: dict[int, session_pb2.Result] = field(default_factory=dict)
    events: list[session_pb2.Event] = field(default_factory=list)
    positions: list[identity_pb2.Position] = field(default_factory=list)


class World:
    """Steps a coordinator and delivers its frames; `seen` lists them as (client, frame) until `take`."""

    def __init__(self, settings: Settings | None = None, job: str = "job", access: Access | None = None) -> None:
        self.access = access
        self.settings = settings or Settings(durable=True)
        self.job = job
        self.full = False
        """Whether the journal's disk is full as requests come."""
        self.now = 0
        self.rows: dict[tuple[str, str], bytes] = {}
        self.clients: dict[str, Client] = {}
        self.streams: dict[int, Client] = {}
        self.replies: dict[int, UnaryResponse | error_pb2.ErrorDetail] = {}
        self.seen: list[tuple[str, session_pb2.ServerFrame]] = []
        self.effects: list[Effect] = []
        self.notes: list[Note] = []
        self._numbers = itertools.count(1)
        self._mints = itertools.count(1)
        self._next_beat = BEAT_NS
        self.coordinator = self._start()

    def _start(self) -> Coordinator:
        recovered = [(table, key, value) for (table, key), value in sorted(self.rows.items())]
        return Coordinator(
            self.settings, recovered, access=self.access, mint=lambda: f"minted-{next(self._mints)}", now_ns=self.now
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """One step at the current time, including everything it causes."""
        effects = self.coordinator.step(event, self.now)
        self.effects = effects
        for effect in effects:
            self._carry_out(effect)
        return effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(table, key, value):
                if value is None:
                    self.rows.pop((table, key), None)
                else:
                    self.rows[table, key] = value
            case Send():
                shared = effect.frame.SerializeToString()
                for stream, overlay in effect.recipients:
                    self._deliver(stream, session_pb2.ServerFrame.FromString(shared + overlay))
            case Note():
                self.notes.append(effect)
            case Reply(call, message):
                self.replies[call] = message
            case Close(stream):
                client = self.streams.pop(stream, None)
                if client is not None and client.stream == stream:
                    client.stream = None
                self.step(Disconnected(stream))

    def _deliver(self, stream: int, frame: session_pb2.ServerFrame) -> None:
        client = self.streams.get(stream)
        if client is None:
            return
        client.positions.append(frame.position)
        self.seen.append((client.name, frame))
        body = frame.WhichOneof("body")
        if body == "welcome":
            client.token = frame.welcome.resume_token
        elif body == "event":
            client.events.append(frame.event)
            client.over = client.over or frame.event.WhichOneof("kind") == "fenced"
        elif body == "result":
            client.pending.pop(frame.result.sequence, None)
            client.results[frame.result.sequence] = frame.result
            if frame.result.WhichOneof("outcome") == "join":
                client.generation, client.rank = frame.result.join.generation, frame.result.join.rank

    def take(self) -> list[tuple[str, session_pb2.ServerFrame]]:
        """The frames sent since the last `take`."""
        seen, self.seen = self.seen, []
        return seen

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, duration_ns: int) -> None:
        """Lets time pass: the coordinator is called at its deadlines, clients send heartbeats."""
        until = self.now + duration_ns
        while True:
            deadline = self.coordinator.next_deadline()
            when = min(until, self._next_beat, until if deadline is None else max(deadline, self.now))
            self.now = when
            if deadline is not None and deadline <= when:
                self.step(Tick())
                again = self.coordinator.next_deadline()
                assert again is None or again > self.now, "a deadline that does not move would spin"
            if when == self._next_beat:
                self._next_beat += BEAT_NS
                self._beat()
            if when == until:
                return

    def pause(self, duration_ns: int) -> None:
        """The coordinator is stopped; heartbeats pile up and are read at once when it continues."""
        self.now += duration_ns
        self.step(Tick())
        self._beat()
        self._next_beat = self.now + BEAT_NS

    def _beat(self) -> None:
        for client in list(self.clients.values()):
            client.operation_ms += BEAT_NS // MILLISECOND if client.waits else 0
            if client.stream is not None and not client.frozen:
                beat = session_pb2.Beat(
                    step=client.step,
                    activity=client.activity,
                    generation=client.generation,
                    operation_ms=client.operation_ms,
                )
                self.step(Received(client.stream, session_pb2.ClientFrame(beat=beat)))

    # -- clients -------------------------------------------------------------------------------------------------------

    def hello(self, name: str, host: str = "", resume: bool = False, instance: str = "1", **more: object) -> Client:
        """Connects a client of this name: a new process, or (resume) the one that was disconnected."""
        client = self.clients.get(name)
        if client is None or not resume:
            client = self.clients[name] = Client(name, host, instance)
        stream = next(self._numbers)
        if client.stream is not None:
            self.streams.pop(client.stream, None)
        client.stream = stream
        self.streams[stream] = client
        said: dict[str, Any] = {
            "protocol_version": SESSION_PROTOCOL_VERSION,
            "job": self.job,
            "name": name,
            "instance_id": client.instance,
            "host": client.host,
            "address": f"{client.host or name}:7000",
            "resume_token": client.token if resume else "",
            "version": "1",
        }
        hello = session_pb2.Hello(**said | more)
        self.step(Connected(stream, hello))
        if resume and not client.over:
            for frame in list(client.pending.values()):
                self.step(Received(stream, frame))
        return client

    def cut(self, name: str) -> None:
        """The client's stream ends without a Leave."""
        client = self.clients[name]
        if client.stream is not None:
            stream, client.stream = client.stream, None
            self.streams.pop(stream, None)
            self.step(Disconnected(stream))

    def ask(self, name: str, **body: object) -> int:
        """Sends a numbered request, such as join=JoinRequest(...); returns its number."""
        client = self.clients[name]
        client.sequence += 1
        frame = session_pb2.ClientFrame(sequence=client.sequence, **body)  # type: ignore[arg-type]
        client.pending[client.sequence] = frame
        if client.stream is not None:
            self.step(Received(client.stream, frame, self.full))
        return client.sequence

    def call(self, request: UnaryRequest) -> int:
        """Makes a unary call; its answer will be in `replies`."""
        number = next(self._numbers)
        self.step(Called(number, request, full=self.full))
        return number

    def restart(self) -> None:
        """The coordinator dies and starts again on its journal; all streams end."""
        for client in self.clients.values():
            client.stream = None
        self.streams.clear()
        self.coordinator = self._start()
        self.step(Tick())
