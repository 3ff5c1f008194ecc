"""The members of a job by name, and their descriptions in events, status and error messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from ferrorpc.logs import escape_unprintable
from ferrorpc.v1 import identity_pb2, session_pb2
from ferrorpc_coordinator.state.context import JobContext
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.settings import MILLISECOND, format_seconds

TABLE: Final = "member"
MEMBERS_PER_EVENT: Final = 256
"""Members described in one event."""
REASON_CHARACTERS_MAX: Final = 4096
_PRESENT: Final = Liveness.PRESENT  # what most are; a status asks for each, and an enum's names and hashes are slow
_STATES: Final = {
    Liveness.STALLED: identity_pb2.MEMBER_STATE_STALLED,
    Liveness.SUSPECT: identity_pb2.MEMBER_STATE_SUSPECT,
    Liveness.DEAD: identity_pb2.MEMBER_STATE_DEAD,
    Liveness.LEFT: identity_pb2.MEMBER_STATE_LEFT,
}


class Members:
    """The latest process of each name.

    Dead and departed members are kept up to a limit, for their incarnation and last rank.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._by_name: dict[str, Member] = {}
        self._gone: dict[str, None] = {}
        self.empty_since = context.durable_state.revision
        """The revision at which the last living member went. Only valid while `living` is 0."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_name.values())

    @property
    def living(self) -> int:
        """How many are neither dead nor departed."""
        return len(self._by_name) - len(self._gone)

    def get(self, name: str) -> Member | None:
        """The latest process of this name."""
        return self._by_name.get(name)

    def add(self, member: Member) -> None:
        """Adds a process. It replaces an earlier one of its name, which must be dead or gone.

        Those of the journal are added in the order of their revisions.
        """
        self._by_name.pop(member.name, None)
        self._gone.pop(member.name, None)
        self._by_name[member.name] = member
        if not member.alive:
            self._note_gone(member)

    def save(self, member: Member) -> None:
        """Writes the member's row."""
        member.revision = self._context.durable_state.next_revision()
        self._context.put(TABLE, member.name, member.row())

    def mark_gone(self, member: Member) -> None:
        """Marks a member as dead or gone; past the limit, forgets those that have been gone the longest."""
        self.save(member)
        self._note_gone(member)
        while len(self._gone) > self._context.limits.gone_members:
            name = next(iter(self._gone))
            del self._gone[name]
            del self._by_name[name]
            self._context.remove(TABLE, name)

    def erase(self) -> None:
        """Removes all members and their rows."""
        for name in self._by_name:
            self._context.remove(TABLE, name)
        self._by_name.clear()
        self._gone.clear()

    def _note_gone(self, member: Member) -> None:
        self._gone[member.name] = None
        self.empty_since = member.revision

    def state(self, member: Member, joining: bool = False) -> identity_pb2.MemberState.ValueType:
        """The member's state, as reported to others."""
        if member.liveness is not _PRESENT:
            return _STATES[member.liveness]
        if member.rank >= 0:
            return identity_pb2.MEMBER_STATE_ACTIVE
        return identity_pb2.MEMBER_STATE_JOINING if joining else identity_pb2.MEMBER_STATE_WAITING

    def describe(self, member: Member, joining: bool = False) -> identity_pb2.Member:
        """The member, as reported to others."""
        description = identity_pb2.Member(
            name=member.name,
            incarnation=member.incarnation,
            rank=member.rank,
            state=self.state(member, joining),
            host=member.host,
            address=member.address,
            step=member.step,
            beat_age_ms=max(0, self._context.now - member.last_heard) // MILLISECOND,
            reason=escape_unprintable(member.reason)[:REASON_CHARACTERS_MAX],
            activity=escape_unprintable(member.activity),
            step_age_ms=max(0, self._context.now - member.step_since) // MILLISECOND,
            operation_ms=member.operation_ms,
            training=member.training,
        )
        for name, value in member.labels.items():
            description.labels.add(name=name, value=value)
        return description

    def state_events(self, members: Iterable[Member]) -> Iterator[session_pb2.Event]:
        """Events that report the states of these members, each small enough for one frame."""
        rest = iter(members)
        while part := list(islice(rest, MEMBERS_PER_EVENT)):
            standings = session_pb2.Standings(members=[self.describe(member) for member in part])
            for member in standings.members:
                member.ClearField("labels")
            yield session_pb2.Event(standings=standings)

    def summary(self, member: Member) -> str:
        """The member in an error message: rank, name, host, state and the age of its last beat."""
        why = f" ({member.reason})" if member.reason else ""
        doing = f", last seen in {member.activity}" if member.activity else ""
        age = (
            "not heard of since the coordinator restarted"
            if member.recovered
            else (f"last beat {format_seconds(max(0, self._context.now - member.last_heard))} ago")
        )
        return f"{member.display_name}: {member.liveness.value}{why}, {age}, step {member.step}{doing}"
