"""The coordinator as a state machine: `step(event, now) -> effects`. No clock, socket, thread or log inside.

    Connected, Received, Disconnected   of Session streams --> the member's job
    Called, Cancelled                   unary calls        --> the named job
    Tick                                                   --> whatever has expired
    Drain                                                  --> everybody is told

What every step does first: it lives on to `now` (a gap that was the coordinator's own pause is taken out) and lets expire
what is due, so a late beat never revives what an earlier deadline has ended. What it does last: rows, then answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ferrorpc.errors import (
    AuthenticationError,
    ConfigError,
    CoordinatorUnavailableError,
    FerroError,
    MessageTooLargeError,
    PermissionDeniedError,
    VersionMismatchError,
    require,
)
from ferrorpc.v1 import session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.identity import Role
from ferrorpc.wire.refusal_log import RefusalLog
from ferrorpc_coordinator.state.access import Access, needed_for
from ferrorpc_coordinator.state.admission import check_name
from ferrorpc_coordinator.state.desk import Asker, World
from ferrorpc_coordinator.state.effects import Effect, Note, Reply, Row
from ferrorpc_coordinator.state.events import (
    Called,
    Caller,
    Cancelled,
    Connected,
    Disconnected,
    Drain,
    Event,
    Received,
    Tick,
    UnaryRequest,
)
from ferrorpc_coordinator.state.job import TABLES, Job, sets_a_value
from ferrorpc_coordinator.state.ledger import Ledger
from ferrorpc_coordinator.state.lifetime import Lifetime
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.settings import PROTOCOL_VERSION, Settings


class Coordinator:
    """Decides for every job on this service.

    Args:
        settings: durations and limits.
        recovered: every durable row of the journal; empty for a new cluster.
        access: who may do what; everybody everything without it.
        mint: gives a fresh unguessable text at each call (cluster id, resume tokens).
        now_ns: the present, on the monotonic clock that later steps are given.
    """

    def __init__(
        self,
        settings: Settings,
        recovered: Iterable[Row] = (),
        *,
        access: Access | None = None,
        mint: Callable[[], str],
        now_ns: int,
    ) -> None:
        self.settings = settings
        self._access = Access(()) if access is None else access
        self._refusals = RefusalLog()
        self._ledger = Ledger(recovered, mint)
        self._world = World(settings, self._ledger, mint)
        self._lifetime = Lifetime(now_ns, settings.pulse_ns, settings.pause_ns)
        self._world.now = self._lifetime.advance(now_ns)
        self._jobs: dict[str, Job] = {}
        self._streams: dict[int, tuple[Job, Member]] = {}
        self._calls: dict[int, tuple[Job, Asker]] = {}
        self._draining = False
        self._recover()

    @property
    def cluster_id(self) -> str:
        """Minted with the journal."""
        return self._ledger.cluster_id

    @property
    def epoch(self) -> int:
        """How often a coordinator started on this journal."""
        return self._ledger.epoch

    @property
    def jobs(self) -> dict[str, Job]:
        """Every job by name, for tests and metrics: to look at, not to change."""
        return self._jobs

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Takes in one event; returns what is to be done, in order. Never raises for what a client sent."""
        waiting = self._world.deadlines.earliest() is not None
        self._world.now = self._lifetime.advance(now_ns, called_for=waiting)
        for action in self._world.deadlines.expired(self._world.now):
            action()
        self._take_in(event)
        effects = self._world.answers.flush()
        if self._calls:
            for effect in effects:
                if isinstance(effect, Reply):
                    self._calls.pop(effect.call, None)
        return effects

    def _take_in(self, event: Event) -> None:
        match event:
            case Received(stream, frame, full):
                self._world.full = full
                self._received(stream, frame)
            case Connected(stream, hello, caller):
                self._connected(stream, hello, caller)
            case Disconnected(stream):
                self._disconnected(stream)
            case Called(call, request, caller, full):
                self._world.full = full
                self._called(call, request, caller)
            case Cancelled(call):
                self._cancelled(call)
            case Drain(within_ms):
                self._drain(within_ms)
            case Tick():
                pass

    def next_deadline(self) -> int | None:
        """When to call `step(Tick(), now)` at the latest; None while nothing can expire."""
        earliest = self._world.deadlines.earliest()
        return None if earliest is None else self._lifetime.alarm(earliest)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _connected(self, stream: int, hello: session_pb2.Hello, caller: Caller) -> None:
        try:
            self._check_hello(hello, caller)
            job = self._job(hello.job)
            member, before = job.connect(stream, hello)
        except FerroError as error:
            refused = session_pb2.ServerFrame(event=session_pb2.Event(fenced=detail_of(error)))
            known = self._jobs.get(hello.job)
            self._world.answers.send(None if known is None else known.desk, stream, refused)
            self._world.answers.close(stream)
            return
        self._streams[stream] = job, member
        if before is not None and self._streams.pop(before, None) is not None:
            self._world.answers.close(before)

    def _check_hello(self, hello: session_pb2.Hello, caller: Caller) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"{hello.name[:128]!r} speaks protocol {hello.protocol_version} (ferrorpc {hello.version[:32] or 'unknown'}), "
                f"this coordinator {PROTOCOL_VERSION} (ferrorpc {self.settings.version or 'unknown'})"
            )
        self._require(caller, hello.token, hello.job, Role.WORKER, f"member {hello.name[:128]!r}")
        if self._draining:
            raise CoordinatorUnavailableError("this coordinator is stopping", hint="try again shortly")

    def _received(self, stream: int, frame: session_pb2.ClientFrame) -> None:
        known = self._streams.get(stream)
        if known is None:
            return
        job, member = known
        if member.alive and member.stream == stream:
            job.receive(member, frame)

    def _disconnected(self, stream: int) -> None:
        known = self._streams.pop(stream, None)
        if known is not None:
            job, member = known
            job.disconnect(member, stream)

    def _drain(self, within_ms: int) -> None:
        self._draining = True
        event = session_pb2.Event(draining=session_pb2.Draining(within_ms=within_ms))
        for job in self._jobs.values():
            job.desk.push([member for member in job.roster if member.alive], event)

    # -- unary calls ---------------------------------------------------------------------------------------------------

    def _called(self, call: int, request: UnaryRequest, caller: Caller) -> None:
        try:
            self._require(caller, request.token, request.job, needed_for(request), f"a {type(request).__name__}")
            if isinstance(request, session_pb2.StatusRequest):
                self._status(call, request, caller)
            else:
                self._carry_out(call, request)
        except FerroError as error:
            self._world.answers.reply(None, call, detail_of(error))

    def _carry_out(
        self,
        call: int,
        request: session_pb2.UnaryStoreRequest | session_pb2.UnaryBarrierRequest | session_pb2.UnaryReportRequest,
    ) -> None:
        job = self._job(request.job)
        if isinstance(request, session_pb2.UnaryReportRequest):
            job.call_report(Asker(call, None, ""), request.request)
            return
        if not (isinstance(request, session_pb2.UnaryStoreRequest) and sets_a_value(request.request)):
            what, most = f"bytes of a {type(request).__name__}", self.settings.limits.frame_bytes
            require(what, request.ByteSize(), "frame_bytes", most, MessageTooLargeError)
        if request.client_id:
            check_name("client id", request.client_id, self.settings.limits.name_bytes)
        client = f"~{request.client_id}" if request.client_id else f"~call-{self.epoch}-{call}"
        asker = Asker(call, None, client)
        self._calls[call] = job, asker
        if isinstance(request, session_pb2.UnaryStoreRequest):
            job.call_store(asker, request.request)
        else:
            job.call_barrier(asker, request.request)

    def _cancelled(self, call: int) -> None:
        known = self._calls.pop(call, None)
        if known is not None:
            known[0].cancel(known[1])

    def _status(self, call: int, request: session_pb2.StatusRequest, caller: Caller) -> None:
        job = self._jobs.get(request.job)
        if job is None:
            known = ", ".join(sorted(name for name in self._jobs if self._access.permits_a_look(caller, request.token, name)))
            text = f"there is no job {request.job[:128]!r} here"
            hint = f"the jobs of this coordinator: {known or 'none yet'}"
            raise ConfigError(text, hint=hint) if self._jobs else ConfigError(text, hint=hint, jobs=0)
        self._world.answers.reply(job.desk, call, job.status(self.settings.version, self.settings.durable))

    def _require(self, caller: Caller, token: str, job: str, needed: Role, what: str) -> None:
        """Refuses who may not do this, and tells of it."""
        try:
            self._access.check(caller, token, job, needed)
        except (AuthenticationError, PermissionDeniedError) as error:
            place = f" from {caller.address}" if caller.address else ""
            words = self._refusals.message(f"{what}{place} was refused: {error.message}", self._world.now)
            if words is not None:
                self._world.answers.note(Note(job if job in self._jobs else "-", "refused", words, -1, 0))
            raise

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _job(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            check_name("job name", name, self.settings.limits.name_bytes)
            if len(self._jobs) >= self.settings.limits.jobs:
                self._forget_a_job()
            require("jobs of this coordinator", len(self._jobs) + 1, "jobs", self.settings.limits.jobs)
            job = self._jobs[name] = Job(self._world, name)
        return job

    def _forget_a_job(self) -> None:
        """Makes room for a new job in place of the one that ended first. One that only waits for new processes ended last."""
        waiting = {job.desk.job for job, _ in self._calls.values()}
        ended = [name for name, job in self._jobs.items() if job.roster.living == 0 and name not in waiting]
        if ended:
            first = min(ended, key=lambda name: self._jobs[name].roster.deserted)
            self._jobs.pop(first).erase()
            text = f"forgotten, with its store, for a new job: of the {self.settings.limits.jobs} that are kept it ended first"
            self._world.answers.note(Note(first, "forgotten", text, -1, 0))

    def _recover(self) -> None:
        by_job: dict[str, dict[str, dict[str, bytes]]] = {}
        for table in TABLES:
            for path, data in self._ledger.rows.pop(table, {}).items():
                name, _, key = path.partition("/")
                by_job.setdefault(name, {}).setdefault(table, {})[key] = data
        for name in sorted(by_job):
            job = self._jobs[name] = Job(self._world, name)
            job.recover(by_job.pop(name))
