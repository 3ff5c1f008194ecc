"""One job: a namespace with its own members, generations, barriers and store. Here the parts are told of each other."""

from __future__ import annotations

from collections.abc import Callable
from signal import Signals
from typing import Any, Final

from ferrorpc.errors import (
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
from ferrorpc_coordinator.state.bootstrap import Bootstraps
from ferrorpc_coordinator.state.bulletin import Bulletin
from ferrorpc_coordinator.state.desk import Asker, Desk, World
from ferrorpc_coordinator.state.failures import Refused
from ferrorpc_coordinator.state.generations import Generation, Generations
from ferrorpc_coordinator.state.leases import Leases
from ferrorpc_coordinator.state.member import Member, Standing
from ferrorpc_coordinator.state.rendezvous import Rendezvous
from ferrorpc_coordinator.state.roster import Roster
from ferrorpc_coordinator.state.settings import MILLISECOND
from ferrorpc_coordinator.state.store import Store

TABLES: Final = ("member", "generation", "store", "write", "barrier")


class Job:
    """Everything the coordinator knows under one job's name."""

    def __init__(self, world: World, name: str) -> None:
        self.desk = Desk(world, name)
        self.roster = Roster(self.desk)
        self.admission = Admission(self.desk, self.roster)
        self.generations = Generations(self.desk, self.roster, self._break, lambda member: self.rendezvous.joining(member))
        self.rendezvous = Rendezvous(self.desk, self.roster, self.generations, self._replaced)
        self.leases = Leases(self.desk, self._standing_changed, self.lose)
        self.barriers = Barriers(self.desk, self.roster)
        self.store = Store(self.desk, self.generations)
        self.bootstraps = Bootstraps(self.desk)
        self._changed: dict[str, Member] = {}
        """Of whose standing the others have not been told."""
        self._standings = Bulletin(self.desk, "standings", self._tell_standings)
        self._handlers: dict[str, Callable[[Asker, Member, Any], None]] = {
            "join": self.rendezvous.join,
            "leave": self._leave,
            "barrier": self._barrier,
            "store": self._store,
            "comm_bootstrap": self._comm_bootstrap,
            "report": self._report,
            "describe": self._describe,
        }

    # -- sessions ------------------------------------------------------------------------------------------------------

    def connect(self, stream: int, hello: session_pb2.Hello) -> tuple[Member, int | None]:
        """A new stream; returns its member, and the member's stream until now if it had another.

        Raises:
            FerroError: the Hello is refused.
        """
        admitted = self.admission.admit(hello)
        member = admitted.member
        if admitted.replaced is not None:
            where = f" on {hello.host}" if hello.host else ""
            self.lose(admitted.replaced, f"another process{where} took over its name")
        before = member.stream
        if not admitted.resumed:
            self.roster.add(member)
            self.roster.save(member)
        elif before is not None:
            self.store.watches.stream_ended(before)
        self.leases.connected(member, stream)
        self._welcome(stream, admitted)
        if admitted.resumed:
            self._catch_up(member)
        return member, before

    def disconnect(self, member: Member, stream: int) -> None:
        """A stream ended."""
        self.store.watches.stream_ended(stream)
        if member.stream == stream:
            self.leases.disconnected(member)
            self.rendezvous.review()

    def receive(self, member: Member, frame: session_pb2.ClientFrame) -> None:
        """A frame of a living member's stream."""
        self.leases.heard(member)
        body = frame.WhichOneof("body")
        if body == "beat":
            member.beat(frame.beat, self.desk.now, self.desk.limits.links)
            return
        if frame.sequence in member.open_requests or self.desk.repeat(member, frame.sequence):
            return
        asker = Asker(frame.sequence, member, member.client)
        member.open_requests.add(frame.sequence)
        try:
            handler = self._handler(member, body, frame)
            handler(asker, member, getattr(frame, body or ""))
        except FerroError as error:
            self.desk.answer(asker, detail_of(error))
        except Refused as refused:
            self.desk.answer(asker, refused.detail)

    def lose(self, member: Member, reason: str) -> None:
        """A member is dead: everyone who counts on it is told why. If it still listens, it is told too."""
        self._part(member, Standing.DEAD, reason)
        if member.stream is not None:
            over = StaleGenerationError(f"the session of {member} is over: {reason}")
            self.desk.push([member], session_pb2.Event(fenced=detail_of(over)))
        self._hang_up(member)
        self._break_for(member, reason)
        self._parted(member)

    # -- unary calls ---------------------------------------------------------------------------------------------------

    def call_store(self, asker: Asker, request: store_pb2.StoreRequest) -> None:
        """A store request from outside a session."""
        self.store.request(asker, request)

    def call_barrier(self, asker: Asker, request: barrier_pb2.BarrierRequest) -> None:
        """A barrier's arrival from outside a session."""
        if request.generation:
            raise UsageError("a unary call belongs to no generation; its barriers have generation 0 and a count")
        self.barriers.arrive(asker, request, None)

    def call_report(self, asker: Asker, request: session_pb2.ReportRequest) -> None:
        """A launcher tells how a process ended, or an operator takes a member out."""
        subject = request.WhichOneof("subject")
        if subject == "exit":
            self._exited(request.exit)
        elif subject == "removal":
            self._remove(request.removal)
        else:
            raise UsageError("a unary report tells the exit of a process; failures and links are reported by sessions")
        self.desk.answer(asker, session_pb2.ReportResponse())

    def cancel(self, asker: Asker) -> None:
        """A unary caller went away."""
        self.store.call_cancelled(asker.number)
        self.barriers.cancelled(asker)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _handler(
        self, member: Member, body: str | None, frame: session_pb2.ClientFrame
    ) -> Callable[[Asker, Member, Any], None]:
        limits = self.desk.limits
        if body is None:
            raise VersionMismatchError(f"{member} sent a request that this coordinator does not know")
        if body not in self._handlers or frame.sequence == 0:
            raise UsageError(f"{member} sent {body} with number {frame.sequence} in an open session")
        if not (frame.HasField("store") and sets_a_value(frame.store)):
            require(f"bytes of a {body} frame", frame.ByteSize(), "frame_bytes", limits.frame_bytes, MessageTooLargeError)
        require(f"open requests of {member}", len(member.open_requests), "requests", limits.requests)
        return self._handlers[body]

    def _leave(self, asker: Asker, member: Member, request: rendezvous_pb2.LeaveRequest) -> None:
        self.desk.answer(asker, rendezvous_pb2.LeaveResponse())
        self._hang_up(member)
        if request.reason:
            self._part(member, Standing.DEAD, request.reason[:4096])
            self._break_for(member, member.reason)
        else:
            self._part(member, Standing.LEFT, "it left the job")
        self._parted(member)

    def _barrier(self, asker: Asker, member: Member, request: barrier_pb2.BarrierRequest) -> None:
        generation = self.generations.require(member, request.generation) if request.generation else None
        self.barriers.arrive(asker, request, generation)

    def _store(self, asker: Asker, member: Member, request: store_pb2.StoreRequest) -> None:
        self.store.request(asker, request)

    def _comm_bootstrap(self, asker: Asker, member: Member, request: nccl_pb2.CommBootstrapRequest) -> None:
        self.bootstraps.request(asker, request, self.generations.require(member, request.generation))

    def _describe(self, asker: Asker, member: Member, request: session_pb2.DescribeRequest) -> None:
        newest = self.generations.newest
        seats = () if newest is None else newest.seats
        chosen = [seats[rank] for rank in request.ranks if rank < len(seats)] if request.ranks else seats
        known = [self.roster.describe(other, self.rendezvous.joining(other)) for other in chosen]
        self.desk.answer(asker, session_pb2.DescribeResponse(members=known))

    def _report(self, asker: Asker, member: Member, request: session_pb2.ReportRequest) -> None:
        subject = request.WhichOneof("subject")
        if subject is None or subject == "removal":
            raise UsageError(f"{member} reported {'a removal, which is for operators' if subject else 'nothing'}")
        if subject == "exit":
            self._exited(request.exit)
        elif subject == "failure":
            generation = self.generations.require(member, request.generation)
            self._break(generation, request.failure, member.rank)
        else:
            generation = self.generations.require(member, request.generation)
            self.generations.link_lost(member, request.link_lost, generation)
        self.desk.answer(asker, session_pb2.ReportResponse())

    def _remove(self, removal: session_pb2.Removal) -> None:
        member = self.roster.get(removal.name)
        if member is None or not member.alive:
            raise UsageError(
                f"no living member of job {self.desk.job} is called {removal.name[:128]!r}", hint="see `ferrorpc status`"
            )
        self.lose(member, f"an operator removed it{f': {removal.reason[:1024]}' if removal.reason else ''}")

    def _exited(self, exited: session_pb2.ProcessExit) -> None:
        member = self.roster.get(exited.name)
        if member is None:
            self.rendezvous.never_came(exited.name, _how(exited))
        if member is None or not member.alive or exited.instance_id not in member.known_as:
            return
        self.lose(member, _how(exited))

    # -- what follows from it ------------------------------------------------------------------------------------------

    def _hang_up(self, member: Member) -> None:
        if member.stream is not None:
            self.store.watches.stream_ended(member.stream)
            self.desk.world.answers.close(member.stream)
            member.stream = None

    def _part(self, member: Member, standing: Standing, reason: str) -> None:
        member.standing, member.reason = standing, reason
        self.desk.chronicle.add(standing.value, f"{member.title}: {reason}", rank=member.rank, generation=member.generation)
        self.leases.forget(member)
        self.roster.note_gone(member)
        self.rendezvous.withdraw(member)

    def _break_for(self, member: Member, reason: str) -> None:
        newest = self.generations.newest
        if newest is not None and newest.holds(member) and not newest.over:
            text = f"{member.title} was lost: {reason}"
            self._break(newest, detail_of(PeerLostError(member.rank, reason, text)), member.rank)

    def _parted(self, member: Member) -> None:
        """The rest of a member's end, once its generation knows: its keys, its arrivals, its seat."""
        self._standing_changed(member)
        self.barriers.lost(member)
        newest = self.generations.newest
        if newest is not None and newest.holds(member) and not newest.over:
            newest.departed.add(member.rank)
            self.barriers.lost(member)
            self.bootstraps.lost(newest)
            if len(newest.departed) == len(newest.seats):
                self._over(newest, "all its members left")
                self.generations.end(newest, "all its members left")
        self.store.client_gone(member.client)
        member.open_requests.clear()
        self.rendezvous.review()

    def _break(self, generation: Generation, cause: error_pb2.ErrorDetail, origin: int) -> None:
        if self.generations.break_(generation, cause, origin):
            self._clear(generation, cause)
            self.rendezvous.review()

    def _replaced(self, generation: Generation) -> None:
        """A round closed after this generation."""
        if not generation.over:
            self._over(generation, "a new generation replaces it")

    def _over(self, generation: Generation, why: str) -> None:
        self._clear(generation, detail_of(StaleGenerationError(f"generation {generation.number} is over: {why}")))

    def _clear(self, generation: Generation, cause: error_pb2.ErrorDetail) -> None:
        self.barriers.generation_over(generation, cause)
        self.bootstraps.generation_over(cause)
        self.store.generation_over(generation.number)

    def _standing_changed(self, member: Member) -> None:
        """The others of its generation are told, while it goes on; a suspect one that came back may complete a round."""
        newest = self.generations.newest
        if newest is not None and newest.holds(member) and not newest.over:
            self._changed[member.name] = member
            self._standings.issue()
        if member.standing is Standing.PRESENT and self.rendezvous.joining(member):
            self.rendezvous.review()

    def _tell_standings(self) -> int:
        changed, self._changed = list(self._changed.values()), {}
        newest = self.generations.newest
        if newest is None or newest.over:
            return 0
        changed = [member for member in changed if newest.holds(member)]
        alone = changed[0] if len(changed) == 1 else None
        others = [member for member in newest.seats if member is not alone]
        return max((self.desk.push(others, event) for event in self.roster.standings(changed)), default=0)

    def _welcome(self, stream: int, admitted: Admitted) -> None:
        member, settings = admitted.member, self.desk.settings
        welcome = session_pb2.Welcome(
            resume_token=admitted.token,
            incarnation=member.incarnation,
            lease_ms=member.lease_ns // MILLISECOND,
            heartbeat_interval_ms=max(1, min(settings.heartbeat_ns, member.lease_ns // 4) // MILLISECOND),
            resumed=admitted.resumed,
            durable=settings.durable,
        )
        self.desk.world.answers.send(self.desk, stream, session_pb2.ServerFrame(welcome=welcome))

    def _catch_up(self, member: Member) -> None:
        """What was pushed while a resumed member did not listen, as far as it still matters."""
        newest = self.generations.newest
        if newest is None or not newest.holds(member):
            return
        if newest.broken is not None:
            self.desk.push([member], session_pb2.Event(broken=newest.broken))
        told = [seat for rank, seat in enumerate(newest.seats) if rank in newest.departed or seat.standing is Standing.STALLED]
        for event in self.roster.standings(told):
            self.desk.push([member], event)
        self.rendezvous.catch_up(member)

    # -- recovery and status -------------------------------------------------------------------------------------------

    def recover(self, rows: dict[str, dict[str, bytes]]) -> None:
        """Takes back what was durable, by table and key within the job."""
        for name, data in rows.get("member", {}).items():
            member = Member.from_row(name, data)
            self.roster.add(member)
            member.heard = member.step_since = self.desk.now  # no times are kept: ages count from the restart
            if member.alive:
                self.leases.recovered(member)
        for number, data in sorted((int(key), data) for key, data in rows.get("generation", {}).items()):
            self.generations.recover(number, data)
        self.generations.seat_recovered()
        clients = [member.client for member in self.roster if member.alive]
        self.store.recover(rows.get("store", {}), rows.get("write", {}), clients)
        self.barriers.recover(rows.get("barrier", {}))

    def erase(self) -> None:
        """Removes every row of a job that has ended."""
        for member in self.roster:
            self.desk.remove("member", member.name)
        self.generations.erase()
        self.store.erase()
        self.barriers.erase()

    def status(self, version: str, durable: bool) -> session_pb2.StatusResponse:
        """All there is to tell."""
        keyspace = self.store.keyspace
        return session_pb2.StatusResponse(
            job=self.desk.job,
            members=self._told_members(),
            barriers=self.barriers.status(),
            generations=self.generations.told(),
            store_keys=len(keyspace),
            store_bytes=keyspace.bytes,
            durable=durable,
            version=version,
            waiting_reason=self.rendezvous.waiting_reason(),
            occurrences=self.desk.chronicle.told(),
            stragglers=self.barriers.stragglers(),
        )

    def _told_members(self) -> list[identity_pb2.Member]:
        """Everybody, in rank order, each with its share of the links that may be told of."""
        by_rank = sorted(self.roster, key=lambda member: (member.rank < 0, member.rank))
        most = max(1, self.desk.limits.told_links // max(1, len(by_rank)))
        members = []
        for member in by_rank:
            told = self.roster.describe(member, self.rendezvous.joining(member))
            told.links.extend(member.busiest_links(most))
            members.append(told)
        return members


def sets_a_value(request: store_pb2.StoreRequest) -> bool:
    """Whether a request may be as large as a value."""
    return request.WhichOneof("operation") in ("set", "compare_set")


def _how(exited: session_pb2.ProcessExit) -> str:
    """How a process ended, in words."""
    code = exited.returncode
    if code < 0:
        known = -code in Signals._value2member_map_
        how = f"killed by signal {-code} ({Signals(-code).name})" if known else f"killed by signal {-code}"
    else:
        how = f"exited with code {code}" + ("" if code else " without leaving the job")
    return f"{how}: {exited.reason[:4096]}" if exited.reason else how
