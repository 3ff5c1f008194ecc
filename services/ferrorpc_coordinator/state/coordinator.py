"""The coordinator as a state machine: `step(event, now) -> effects`. It has no clock, socket, thread or log.

    Connected, Received, Disconnected   of Session streams --> the member's job
    Called, Cancelled                   unary calls        --> the named job
    Tick                                                   --> deadlines only
    Drain                                                  --> all members are told
    JournalRemoved                                         --> what a status says

Each step first advances the running time to `now` (a pause of the coordinator itself is not counted) and runs the deadlines
that have passed, so a late heartbeat never undoes what an earlier deadline has ended. The effects of a step are rows first,
then answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

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
from ferrorpc.wire.limits import SESSION_PROTOCOL_VERSION
from ferrorpc.wire.refusal_log import RefusalLog, quoted
from ferrorpc_coordinator.state.access import Access, required_role
from ferrorpc_coordinator.state.admission import check_hello, check_name, unknown_session
from ferrorpc_coordinator.state.context import Requester, SharedState
from ferrorpc_coordinator.state.durable_state import DurableState
from ferrorpc_coordinator.state.effects import Effect, Note, Reply, Row
from ferrorpc_coordinator.state.events import (
    Called,
    Caller,
    Cancelled,
    Connected,
    Disconnected,
    Drain,
    Event,
    JournalRemoved,
    Received,
    Tick,
    UnaryRequest,
)
from ferrorpc_coordinator.state.job import TABLES, Job
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.running_time import RunningTime
from ferrorpc_coordinator.state.settings import Settings
from ferrorpc_coordinator.state.store import sets_a_value, writes_or_waits

JOBS_NAMED_MAX: Final = 16
"""In an error."""
_OF_STRANGERS: Final = (AuthenticationError, PermissionDeniedError, VersionMismatchError)
"""Why a Hello is refused that is not of a member. From a stranger nobody is heard: he may be on the coordinator's own host."""


class Coordinator:
    """The state of all jobs of one coordinator.

    Args:
        settings: durations and limits.
        recovered: all rows of the journal; empty for a new cluster.
        access: who may do what; without it everybody may do everything.
        mint: returns a new unguessable string (cluster id, resume tokens).
        now_ns: the current time, on the monotonic clock of later steps.
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
        self._durable_state = DurableState(recovered, mint)
        self._shared = SharedState(settings, self._durable_state, mint)
        self._running_time = RunningTime(now_ns, settings.tick_interval_ns, settings.pause_ns)
        self._shared.now = self._shared.last_heard = now_ns
        self._jobs: dict[str, Job] = {}
        self._streams: dict[int, tuple[Job, Member]] = {}
        self._calls: dict[int, tuple[Job, Requester]] = {}
        self._draining = False
        self._recover()

    @property
    def cluster_id(self) -> str:
        """The cluster's id, created with the journal."""
        return self._durable_state.cluster_id

    @property
    def epoch(self) -> int:
        """How many times a coordinator has started on this journal."""
        return self._durable_state.epoch

    @property
    def jobs(self) -> dict[str, Job]:
        """All jobs by name, for tests and metrics; not to be changed."""
        return self._jobs

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handles one event; returns the effects in order. Never raises for anything that a client sent."""
        waiting = self._shared.deadlines.earliest() is not None
        self._shared.now = self._running_time.advance(now_ns, tick_requested=waiting)
        for action in self._shared.deadlines.expired(self._shared.now):
            action()
        self._dispatch(event)
        effects = self._shared.effects.flush()
        if self._calls:
            for effect in effects:
                if isinstance(effect, Reply):
                    self._calls.pop(effect.call, None)
        return effects

    def _dispatch(self, event: Event) -> None:
        match event:
            case Received(stream, frame, full):
                self._shared.full = full
                self._received(stream, frame)
            case Connected(stream, hello, caller):
                self._connected(stream, hello, caller)
            case Disconnected(stream):
                self._disconnected(stream)
            case Called(call, request, caller, full):
                self._shared.full = full
                self._called(call, request, caller)
            case Cancelled(call):
                self._cancelled(call)
            case Drain(within_ms):
                self._drain(within_ms)
            case JournalRemoved():
                self._shared.durable = False
            case Tick():
                pass

    def next_deadline(self) -> int | None:
        """When to call `step(Tick(), now)` at the latest; None if there is no deadline."""
        earliest = self._shared.deadlines.earliest()
        return None if earliest is None else self._running_time.next_call(earliest)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _connected(self, stream: int, hello: session_pb2.Hello, caller: Caller) -> None:
        try:
            self._check_hello(hello, caller)
            job = self._job(hello.job)
            member, before = job.connect(stream, hello)
            self._keep(job)
        except FerroError as error:
            if not isinstance(error, _OF_STRANGERS):
                self._shared.heard()
            refused = session_pb2.ServerFrame(event=session_pb2.Event(fenced=detail_of(error)))
            known = self._jobs.get(hello.job)
            self._shared.effects.send(None if known is None else known.context, refused, [(stream, b"")])
            self._shared.effects.close(stream)
            return
        self._shared.heard(first=not self._streams)
        self._streams[stream] = job, member
        if before is not None and self._streams.pop(before, None) is not None:
            self._shared.effects.close(before)

    def _check_hello(self, hello: session_pb2.Hello, caller: Caller) -> None:
        who = f"member {hello.name[:128]!r}"
        self._authorize(caller, hello.token, hello.job, Role.WORKER, who)
        if hello.protocol_version != SESSION_PROTOCOL_VERSION:
            error = VersionMismatchError(
                f"{hello.name[:128]!r} speaks protocol {hello.protocol_version} (ferrorpc {quoted(hello.version[:32])}), "
                f"this coordinator {SESSION_PROTOCOL_VERSION} (ferrorpc {self.settings.version or 'unknown'})"
            )
            self._note_refusal(caller, hello.job, who, error)
            job = self._job(hello.job, begins=False)
            job.refused(hello.name[:128], error)
            self._keep_if_room(job)
            raise error
        if self._draining:
            raise CoordinatorUnavailableError("this coordinator is stopping", hint="try again shortly")
        check_hello(hello, self.settings.limits)
        if hello.resume_token and hello.job not in self._jobs:
            raise unknown_session(hello)

    def _received(self, stream: int, frame: session_pb2.ClientFrame) -> None:
        known = self._streams.get(stream)
        if known is None:
            return
        self._shared.heard()
        job, member = known
        if member.stream == stream:
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
            job.context.push([member for member in job.members if member.alive], event)

    # -- unary calls ---------------------------------------------------------------------------------------------------

    def _called(self, call: int, request: UnaryRequest, caller: Caller) -> None:
        try:
            self._authorize(caller, request.token, request.job, required_role(request), f"a {type(request).__name__}")
            if not (isinstance(request, session_pb2.UnaryStoreRequest) and sets_a_value(request.request)):
                what, most = f"bytes of a {type(request).__name__}", self.settings.limits.frame_bytes
                require(what, request.ByteSize(), "frame_bytes", most, MessageTooLargeError)
            if isinstance(request, session_pb2.StatusRequest):
                job = self._known_job(request, caller)
                page = job.status(request.after, self.settings.limits.status_page_bytes)
                self._shared.effects.reply(job.context, call, page)
            elif isinstance(request, session_pb2.UnaryReportRequest):
                removes = request.request.HasField("removal")
                job = self._known_job(request, caller) if removes else self._job(request.job, begins=False)
                job.call_report(Requester(call, None, ""), request.request)
                self._keep_if_room(job)
            else:
                self._unary_request(call, request)
        except FerroError as error:
            self._shared.effects.reply(None, call, detail_of(error))

    def _unary_request(self, call: int, request: session_pb2.UnaryStoreRequest | session_pb2.UnaryBarrierRequest) -> None:
        if request.client_id:
            check_name("client id", request.client_id, self.settings.limits.name_bytes)
        client = f"/{request.client_id}" if request.client_id else f"/{self.epoch}/{call}"  # no name has a slash
        begins = isinstance(request, session_pb2.UnaryBarrierRequest) or writes_or_waits(request.request)
        requester, job = Requester(call, None, client), self._job(request.job, begins=begins)
        self._calls[call] = job, requester
        if isinstance(request, session_pb2.UnaryBarrierRequest):
            job.call_barrier(requester, request.request)
        else:
            job.store.request(requester, request.request)
        if begins:
            self._keep(job)

    def _cancelled(self, call: int) -> None:
        known = self._calls.pop(call, None)
        if known is not None:
            known[0].cancel(known[1])

    def _authorize(self, caller: Caller, token: str, job: str, needed: Role, what: str) -> None:
        """Checks access; records a refusal in the log."""
        try:
            self._access.check(caller, token, job, needed)
        except (AuthenticationError, PermissionDeniedError) as error:
            self._note_refusal(caller, job, what, error)
            raise

    def _note_refusal(self, caller: Caller, job: str, what: str, error: FerroError) -> None:
        place = f" from {caller.address}" if caller.address else ""
        words = self._refusals.message(f"{what}{place} was refused: {error.message}", self._shared.now)
        if words is not None:
            self._shared.effects.note(Note(job if job in self._jobs else "-", "refused", words, -1, 0))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _known_job(self, request: UnaryRequest, caller: Caller) -> Job:
        """The job that a request names.

        Raises:
            ConfigError: there is none of this name; contains those that the caller may see.
        """
        job = self._jobs.get(request.job)
        if job is None:
            allowed = sorted(name for name in self._jobs if self._access.may_observe(caller, request.token, name))
            known = sorted(allowed, key=lambda name: self._jobs[name].members.living == 0)  # the living first
            more = f", and {len(known) - JOBS_NAMED_MAX} more" if len(known) > JOBS_NAMED_MAX else ""
            text = f"there is no job {request.job[:128]!r} here"
            hint = f"the jobs of this coordinator: {', '.join(known[:JOBS_NAMED_MAX]) or 'none yet'}{more}"
            raise ConfigError(text, hint=hint) if self._jobs else ConfigError(text, hint=hint, jobs=0)
        return job

    def _job(self, name: str, *, begins: bool = True) -> Job:
        """The job of this name, or an empty one, which begins with `_keep`, once its first request has been accepted.

        Args:
            begins: whether it may begin, so that there must be room for it.

        Raises:
            ConfigError, LimitExceededError: the name is invalid, or there are too many jobs.
        """
        job = self._jobs.get(name)
        if job is None:
            check_name("job name", name, self.settings.limits.name_bytes)
            if begins and not self._ended_jobs():
                require("jobs of this coordinator", len(self._jobs) + 1, "jobs", self.settings.limits.jobs)
            job = Job(self._shared, name)
        return job

    def _keep(self, job: Job) -> None:
        """Keeps a job that begins, and removes the job that ended first where there is no other room for it."""
        name = job.context.job
        if name in self._jobs:
            return
        if len(self._jobs) >= self.settings.limits.jobs:
            self._evict_ended_job()
        self._jobs[name] = job

    def _keep_if_room(self, job: Job) -> None:
        """As `_keep`, for what is known of processes that did not join: it takes the place of no other job."""
        if len(self._jobs) < self.settings.limits.jobs:
            self._keep(job)

    def _ended_jobs(self) -> list[str]:
        """Names of the jobs that have no living member, and in which nobody waits."""
        waiting = {job.context.job for job, _ in self._calls.values()}
        return [name for name, job in self._jobs.items() if job.members.living == 0 and name not in waiting]

    def _evict_ended_job(self) -> None:
        """Removes the job that ended first, to make room for a new one; one that holds nothing goes before all others.

        Jobs that are only waiting for new processes count as ended last. One that never had a member ended when it began; where
        the coordinator has restarted since, with the restart.
        """
        first = min(
            self._ended_jobs(), key=lambda name: (self._jobs[name].holds_anything, self._jobs[name].members.empty_since)
        )
        self._jobs.pop(first).erase()
        text = f"removed, with its store, to make room for a new job: of {self.settings.limits.jobs} jobs it ended first"
        self._shared.effects.note(Note(first, "forgotten", text, -1, 0))

    def _recover(self) -> None:
        by_job: dict[str, dict[str, dict[str, bytes]]] = {}
        for table in TABLES:
            for path, data in self._durable_state.rows.pop(table, {}).items():
                name, _, key = path.partition("/")
                by_job.setdefault(name, {}).setdefault(table, {})[key] = data
        for name in sorted(by_job):
            job = self._jobs[name] = Job(self._shared, name)
            job.recover(by_job.pop(name))
