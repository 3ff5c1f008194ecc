"""One job: its members, generations, barriers and store. Events that concern several of these parts are handled here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from signal import Signals
from typing import Any, Final

from ferrorpc.errors import (
    ConfigError,
    FerroError,
    MessageTooLargeError,
    PeerLostError,
    StaleGenerationError,
    UsageError,
    VersionMismatchError,
    require,
)
from ferrorpc.v1 import barrier_pb2, error_pb2, identity_pb2, nccl_pb2, rendezvous_pb2, session_pb2, store_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.admission import Admission, Admitted
from ferrorpc_coordinator.state.barriers import Barriers
from ferrorpc_coordinator.state.behind import Behind, behind
from ferrorpc_coordinator.state.context import JobContext, Requester, SharedState
from ferrorpc_coordinator.state.generations import Generation, Generations, Refused
from ferrorpc_coordinator.state.headline import headline
from ferrorpc_coordinator.state.leases import Leases
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.members import REASON_CHARACTERS_MAX, Members
from ferrorpc_coordinator.state.nccl_ids import NcclIdRelay
from ferrorpc_coordinator.state.rendezvous import Rendezvous
from ferrorpc_coordinator.state.settings import MILLISECOND
from ferrorpc_coordinator.state.store import Store, sets_a_value
from ferrorpc_coordinator.state.throttle import BroadcastThrottle

TABLES: Final = ("member", "generation", "store", "write", "barrier")


class Job:
    """The state of one job."""

    def __init__(self, shared: SharedState, name: str) -> None:
        self.context = JobContext(shared, name)
        self.members = Members(self.context)
        self.admission = Admission(self.context, self.members)
        self.generations = Generations(self.context, self.members, self._generation_ended)
        self.rendezvous = Rendezvous(self.context, self.members, self.generations)
        self.leases = Leases(self.context, self._liveness_changed, self.declare_dead)
        self.barriers = Barriers(self.context, self.members)
        self.store = Store(self.context, self.generations)
        self.nccl_ids = NcclIdRelay(self.context)
        self._changed_members: dict[str, Member] = {}
        """Members whose new state has not been sent to the others yet."""
        self._state_changes = BroadcastThrottle(self.context, "member states", self._send_state_changes)
        self._handlers: dict[str, Callable[[Requester, Member, Any], None]] = {
            "join": self._join,
            "leave": self._leave,
            "barrier": self._barrier,
            "store": self._store,
            "comm_bootstrap": self._comm_bootstrap,
            "report": self._report,
            "describe": self._describe,
        }

    @property
    def holds_anything(self) -> bool:
        """Whether it has values in its store, or knows members, living or gone."""
        return len(self.store.keyspace) > 0 or any(True for _ in self.members)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def connect(self, stream: int, hello: session_pb2.Hello) -> tuple[Member, int | None]:
        """A new stream. Returns its member, and the stream that the member had before, if any.

        Raises:
            FerroError: the Hello is refused.
        """
        try:
            admitted = self.admission.admit(hello)
        except ConfigError as error:
            self.refused(hello.name, error)
            raise
        member = admitted.member
        if admitted.replaced is not None:
            self.declare_dead(admitted.replaced, _replacement_text(admitted.replaced, hello))
        before = member.stream
        if not admitted.resumed:
            self.members.add(member)
            self.members.save(member)
        elif before is not None:
            self.store.watches.stream_ended(before)
        if member.address != hello.address:  # its network has changed while it was away; peers are told at the next generation
            member.address = hello.address
            self.members.save(member)
        self.leases.connected(member, stream)
        self._welcome(stream, admitted)
        if admitted.resumed:
            self._catch_up(member)
        return member, before

    def refused(self, name: str, error: FerroError) -> None:
        """A process was refused: those who wait for it, now or soon, are told why."""
        self.rendezvous.strays.refused(name, error.message)

    def disconnect(self, member: Member, stream: int) -> None:
        """A stream ended."""
        if member.stream == stream:
            self.store.watches.stream_ended(stream)
            self.leases.disconnected(member)
            self.rendezvous.review()

    def receive(self, member: Member, frame: session_pb2.ClientFrame) -> None:
        """A frame from a living member's stream."""
        self.leases.frame_received(member)
        body = frame.WhichOneof("body")
        if body == "beat":
            member.beat(frame.beat, self.context.now, self.context.limits.links)
            return
        if frame.sequence in member.open_requests or self.context.resend(member, frame.sequence):
            return
        requester = Requester(frame.sequence, member, member.client)
        member.open_requests.add(frame.sequence)
        try:
            handler = self._handler(member, body, frame)
            handler(requester, member, getattr(frame, body or ""))
        except FerroError as error:
            self.context.answer(requester, detail_of(error))
        except Refused as refused:
            self.context.answer(requester, refused.detail)

    def declare_dead(self, member: Member, reason: str) -> None:
        """Declares a member dead and tells everyone who depends on it, and the member itself if it is still connected."""
        self._mark_gone(member, Liveness.DEAD, reason)
        if member.stream is not None:
            over = StaleGenerationError(f"the session of {member} is over: {reason}")
            self.context.push([member], session_pb2.Event(fenced=detail_of(over)))
        self._close_stream(member)
        generation = self._open_generation_of(member)
        if generation is not None:
            text = f"{member.display_name} was lost: {reason}"
            self.generations.break_(generation, detail_of(PeerLostError(member.rank, reason, text)), member.rank)
        self._clean_up_after(member)

    # -- unary calls ---------------------------------------------------------------------------------------------------

    def call_barrier(self, requester: Requester, request: barrier_pb2.BarrierRequest) -> None:
        """An arrival at a barrier from outside a session."""
        if request.generation:
            raise UsageError("a unary call belongs to no generation; its barriers have generation 0 and a count")
        self.barriers.arrive(requester, request, None)

    def call_report(self, requester: Requester, request: session_pb2.ReportRequest) -> None:
        """A launcher reports how a process ended, or an operator removes a member."""
        subject = request.WhichOneof("subject")
        if subject == "exit":
            self._process_exited(request.exit)
        elif subject == "removal":
            self._remove(request.removal)
        else:
            raise UsageError("a unary report tells the exit of a process; failures and links are reported by sessions")
        self.context.answer(requester, session_pb2.ReportResponse())

    def cancel(self, requester: Requester) -> None:
        """The caller of a unary call has gone."""
        self.store.stop_waiting(requester.number)
        self.barriers.call_cancelled(requester)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _handler(
        self, member: Member, body: str | None, frame: session_pb2.ClientFrame
    ) -> Callable[[Requester, Member, Any], None]:
        limits = self.context.limits
        if body is None:
            raise VersionMismatchError(f"{member} sent a request that this coordinator does not know")
        if body not in self._handlers or frame.sequence == 0:
            raise UsageError(f"{member} sent {body} with number {frame.sequence} in an open session")
        if not (frame.HasField("store") and sets_a_value(frame.store)):
            require(f"bytes of a {body} frame", frame.ByteSize(), "frame_bytes", limits.frame_bytes, MessageTooLargeError)
        require(f"open requests of {member}", len(member.open_requests), "requests", limits.requests)
        return self._handlers[body]

    def _join(self, requester: Requester, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        self.rendezvous.join(requester, member, request)
        self.barriers.member_reforms()

    def _leave(self, requester: Requester, member: Member, request: rendezvous_pb2.LeaveRequest) -> None:
        self.context.answer(requester, rendezvous_pb2.LeaveResponse())
        self._close_stream(member)
        if request.reason:
            self.declare_dead(member, request.reason[:REASON_CHARACTERS_MAX])
        else:
            self._mark_gone(member, Liveness.LEFT, "it left the job")
            self._clean_up_after(member)

    def _barrier(self, requester: Requester, member: Member, request: barrier_pb2.BarrierRequest) -> None:
        generation = self.generations.require(member, request.generation) if request.generation else None
        self.barriers.arrive(requester, request, generation)

    def _store(self, requester: Requester, member: Member, request: store_pb2.StoreRequest) -> None:
        self.store.request(requester, request)

    def _comm_bootstrap(self, requester: Requester, member: Member, request: nccl_pb2.CommBootstrapRequest) -> None:
        self.nccl_ids.request(requester, request, self.generations.require(member, request.generation))

    def _describe(self, requester: Requester, member: Member, request: session_pb2.DescribeRequest) -> None:
        members = self.generations.newest.members
        chosen = [members[rank] for rank in request.ranks if rank < len(members)] if request.ranks else members
        response = session_pb2.DescribeResponse()
        room = self.context.limits.frame_bytes  # a client ends its session over a frame that is too large
        for other in chosen:
            description = self.members.describe(other, self.rendezvous.joining(other))
            room -= description.ByteSize()
            if room < 0:
                break
            response.members.append(description)
        self.context.answer(requester, response)

    def _report(self, requester: Requester, member: Member, request: session_pb2.ReportRequest) -> None:
        subject = request.WhichOneof("subject")
        if subject is None or subject == "removal":
            raise UsageError(f"{member} reported {'a removal, which is for operators' if subject else 'nothing'}")
        if subject == "exit":
            self._process_exited(request.exit)
        else:
            generation = self.generations.require(member, request.generation)
            if subject == "failure":
                self.generations.break_(generation, request.failure, member.rank)
            else:
                self.generations.link_lost(member, request.link_lost, generation)
        self.context.answer(requester, session_pb2.ReportResponse())

    def _remove(self, removal: session_pb2.Removal) -> None:
        member = self.members.get(removal.name)
        if member is None or not member.alive:
            raise UsageError(
                f"no living member of job {self.context.job} is called {removal.name[:128]!r}", hint="see `ferrorpc status`"
            )
        self.declare_dead(member, f"an operator removed it{f': {removal.reason[:1024]}' if removal.reason else ''}")

    def _process_exited(self, exited: session_pb2.ProcessExit) -> None:
        member = self.members.get(exited.name)
        is_own = member is not None and exited.instance_id in member.exit_report_ids
        if member is not None and member.alive:
            if is_own:
                self.declare_dead(member, _exit_text(exited))
        elif member is None or not (is_own or exited.instance_id == member.successor_of):
            # Perhaps the next of that name, which did not get as far as its Hello.
            self.rendezvous.strays.exited(exited.name, _exit_text(exited), has_failed=exited.returncode != 0)

    # -- consequences --------------------------------------------------------------------------------------------------

    def _close_stream(self, member: Member) -> None:
        if member.stream is not None:
            self.store.watches.stream_ended(member.stream)
            self.context.shared.effects.close(member.stream)
            member.stream = None

    def _mark_gone(self, member: Member, liveness: Liveness, reason: str) -> None:
        member.liveness, member.reason = liveness, reason
        text, state = f"{member.display_name}: {reason}", liveness.value
        self.context.occurrences.add(state, text, rank=member.rank, generation=member.generation, state=state)
        self.leases.cancel(member)
        self.members.mark_gone(member)
        self.rendezvous.withdraw(member)

    def _open_generation_of(self, member: Member) -> Generation | None:
        """The newest generation, if the member has a rank in it and it is not over."""
        newest = self.generations.newest
        return newest if member.rank >= 0 and not newest.over else None

    def _clean_up_after(self, member: Member) -> None:
        """Removes what a dead or departed member held: keys, arrivals and its place in the generation."""
        self._liveness_changed(member)
        generation = self._open_generation_of(member)
        if generation is not None:
            generation.departed.add(member.rank)
        self.barriers.member_gone(member)
        if generation is not None:
            self.nccl_ids.member_gone(generation)
            if len(generation.departed) == len(generation.members):
                over = StaleGenerationError(f"generation {generation.number} is over: all its members left")
                self.generations.end(generation, "all its members left", detail_of(over))
        self.store.client_gone(member.client)
        member.open_requests.clear()
        member.answers.clear()
        member.answer_bytes = 0
        if not self.members.living:
            self.store.watches.forget_until(self.context.durable_state.revision)
        self.rendezvous.review()

    def _generation_ended(self, generation: Generation, cause: error_pb2.ErrorDetail) -> None:
        """Fails what waits in a generation, and reviews the round that may follow a broken one."""
        self.barriers.generation_over(generation, cause)
        self.nccl_ids.generation_over(cause)
        self.store.delete_bound(generation.number)
        if generation.broken is not None:
            self.rendezvous.review()

    def _liveness_changed(self, member: Member) -> None:
        """A member's state changed: tells the others of its open generation, and reviews the round if the member can now
        join."""
        if self._open_generation_of(member) is not None:
            self._changed_members[member.name] = member
            self._state_changes.notify()
        if member.liveness is Liveness.PRESENT and self.rendezvous.joining(member):
            self.rendezvous.review()

    def _send_state_changes(self) -> int:
        changed, self._changed_members = list(self._changed_members.values()), {}
        newest = self.generations.newest
        if newest.over:
            return 0
        changed = [member for member in changed if member.rank >= 0]
        alone = changed[0] if len(changed) == 1 else None
        others = [member for member in newest.members if member is not alone]
        return max((self.context.push(others, event) for event in self.members.state_events(changed)), default=0)

    def _welcome(self, stream: int, admitted: Admitted) -> None:
        member, settings = admitted.member, self.context.settings
        welcome = session_pb2.Welcome(
            resume_token=admitted.token,
            incarnation=member.incarnation,
            lease_ms=member.lease_ns // MILLISECOND,
            heartbeat_interval_ms=max(1, settings.beat_ns(member.lease_ns) // MILLISECOND),
            resumed=admitted.resumed,
            durable=self.context.shared.durable,
        )
        self.context.shared.effects.send(self.context, session_pb2.ServerFrame(welcome=welcome), [(stream, b"")])

    def _catch_up(self, member: Member) -> None:
        """Sends a resumed member the events it missed that still matter."""
        newest = self.generations.newest
        if member.rank < 0:
            return
        if newest.broken is not None:
            self.context.push([member], session_pb2.Event(broken=newest.broken))
        changed = [
            other for rank, other in enumerate(newest.members) if rank in newest.departed or other.liveness is Liveness.STALLED
        ]
        for event in self.members.state_events(changed):
            self.context.push([member], event)
        self.rendezvous.catch_up(member)

    # -- recovery and status -------------------------------------------------------------------------------------------

    def recover(self, rows: dict[str, dict[str, bytes]]) -> None:
        """Restores the job from the journal's rows, by table and key within the job."""
        members = [Member.from_row(name, data) for name, data in rows.get("member", {}).items()]
        for member in sorted(members, key=lambda member: member.revision):
            self.members.add(member)
            member.last_heard = member.step_since = self.context.now  # the journal holds no times: ages count from the restart
            if member.alive:
                self.leases.recovered(member)
        for number, data in sorted((int(key), data) for key, data in rows.get("generation", {}).items()):
            self.generations.recover(number, data)
        self.generations.assign_recovered_ranks()
        living = {member.client for member in self.members if member.alive}
        self.store.recover(rows.get("store", {}), rows.get("write", {}), living)
        self.barriers.recover(rows.get("barrier", {}))

    def erase(self) -> None:
        """Removes all of a job that has ended: its rows, and what takes memory, before the garbage collector finds it."""
        self.members.erase()
        self.generations.erase()
        self.store.erase()
        self.barriers.erase()

    def behind(self) -> Behind:
        """Who is behind. In a generation that is over nobody waits for anybody."""
        newest = self.generations.newest
        return behind(() if newest.over else newest.members, self.rendezvous.reforming, self.context.now)

    def status(self, after: int = 0, room: float = math.inf) -> session_pb2.StatusResponse:
        """The job's status, or its page that begins after this many members and barriers and has `room` bytes for more.

        Barriers come last: one that is released between two pages shifts no member out of them.
        """
        by_rank = sorted(self.members, key=lambda member: member.rank if member.rank >= 0 else math.inf)
        late = self.behind()
        page = session_pb2.StatusResponse(job=self.context.job) if after else self._status_without_lists(by_rank, late)
        barriers = self.barriers.status(max(0, after - len(by_rank)))
        parts: Iterator[identity_pb2.Member | session_pb2.BarrierStatus]
        parts = chain(self._members_status(by_rank, late, after), barriers)
        for part in parts:
            room -= part.ByteSize()
            if room < 0 and (page.barriers or page.members):
                page.more = True
                break
            if isinstance(part, identity_pb2.Member):
                page.members.append(part)
            else:
                page.barriers.append(part)
        return page

    def _status_without_lists(self, by_rank: Sequence[Member], late: Behind) -> session_pb2.StatusResponse:
        """The status without barriers and members."""
        keyspace, settings, waiting = self.store.keyspace, self.context.settings, self.rendezvous.waiting_reason()
        return session_pb2.StatusResponse(
            job=self.context.job,
            generations=self.generations.status(),
            store_keys=len(keyspace),
            store_bytes=keyspace.bytes,
            durable=self.context.shared.durable,
            version=settings.version,
            waiting_reason=waiting,
            occurrences=self.context.occurrences.status(),
            stragglers=self.barriers.stragglers(),
            headline=headline(
                by_rank, late, self.generations.newest, self.barriers.status(0), waiting, self.rendezvous.longest_ns
            ),
        )

    def _members_status(self, by_rank: Sequence[Member], late: Behind, after: int) -> Iterator[identity_pb2.Member]:
        """The members without the first `after`, each with an equal share of the links that fit into a status."""
        most = max(1, self.context.limits.status_links // max(1, len(by_rank)))
        for member in by_rank[after:]:
            description = self.members.describe(member, self.rendezvous.joining(member))
            description.links.extend(member.busiest_links(most))
            description.behind_ms = late.durations.get(member.name, 0) // MILLISECOND
            yield description


def _replacement_text(replaced: Member, hello: session_pb2.Hello) -> str:
    """Describes how a member lost its name to another session."""
    if replaced.instance_id == hello.instance_id:
        return "its process forgot this session, as after it was at a coordinator with other data"
    return f"another process{f' on {hello.host}' if hello.host else ''} took over its name"


def _exit_text(exited: session_pb2.ProcessExit) -> str:
    """Describes how a process ended."""
    code = exited.returncode
    if code < 0:
        known = -code in Signals._value2member_map_
        how = f"killed by signal {-code} ({Signals(-code).name})" if known else f"killed by signal {-code}"
    else:
        how = f"exited with code {code}" + ("" if code else " without leaving the job")
    return f"{how}: {exited.reason[:REASON_CHARACTERS_MAX]}" if exited.reason else how
