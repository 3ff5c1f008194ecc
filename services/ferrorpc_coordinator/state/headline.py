"""A job's state in one sentence: what the status page and `ferrorpc status` show first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ferrorpc.logs import escape_unprintable
from ferrorpc.v1 import session_pb2
from ferrorpc_coordinator.state.behind import Behind
from ferrorpc_coordinator.state.generations import Generation
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.members import REASON_CHARACTERS_MAX
from ferrorpc_coordinator.state.settings import SECOND

WAIT_HEADLINE_NS: Final = 5 * SECOND
"""A rank that has been behind, or has waited for the next generation, for longer gets a headline."""
BARRIER_HEADLINE_MS: Final = 1000
"""A barrier that has waited for longer gets a headline."""
_RANKS_NAMED: Final = 3
_UNWELL: Final = (Liveness.STALLED, Liveness.SUSPECT)


def headline(
    members: Sequence[Member],
    late: Behind,
    newest: Generation,
    barriers: Iterable[session_pb2.BarrierStatus],
    waiting: str,
    rendezvous_ns: int,
) -> session_pb2.Headline:
    """A job's state in one sentence, with details.

    Args:
        members: those with a rank first, in rank order.
        late: those that are behind.
        newest: the newest generation.
        barriers: the open ones, the oldest first.
        waiting: why the open round has not closed; empty if there is none.
        rendezvous_ns: for how long members have waited for it.
    """
    level, title, *details = _told(members, late, newest, barriers, rendezvous_ns)
    details += [f"Next round: {waiting}"] if waiting else []
    texts = [escape_unprintable(text)[:REASON_CHARACTERS_MAX] for text in details if text]
    return session_pb2.Headline(level=level, title=escape_unprintable(title), details=texts)


def _told(
    members: Sequence[Member],
    late: Behind,
    newest: Generation,
    barriers: Iterable[session_pb2.BarrierStatus],
    rendezvous_ns: int,
) -> Sequence[str]:
    """Level, title and details."""
    if not newest.number:
        return "idle", _without_a_generation(members)
    ranked = [member for member in members if member.rank >= 0]
    if newest.end_reason:
        if ranked and all(member.liveness is Liveness.LEFT for member in ranked):
            return "idle", "The job is over: all its members left"
        what, why = _parts(newest.end_reason)
        return "bad", what[:1].upper() + what[1:], why, f"generation {newest.number} is over"
    unwell = [member for member in ranked if member.liveness in _UNWELL]
    if unwell:
        more = f", and {len(unwell) - 1} more" if len(unwell) > 1 else ""
        return "warn", f"Rank {unwell[0].rank} is {unwell[0].liveness.value}{more}", unwell[0].reason
    for barrier in barriers:
        if barrier.age_ms <= BARRIER_HEADLINE_MS:
            break
        if barrier.missing_ranks:
            return _barrier(barrier, ranked)
    if rendezvous_ns > WAIT_HEADLINE_NS:
        return "warn", f"A rank has waited {rendezvous_ns / SECOND:.0f} s for the next generation"
    durations = late.durations
    longest = sorted((m for m in ranked if durations.get(m.name, 0) > WAIT_HEADLINE_NS), key=lambda m: -durations[m.name])
    if longest:
        return _behind(longest, durations[longest[0].name], late.others)
    return "good", _working(ranked)


def _working(ranked: Sequence[Member]) -> str:
    gone = sum(not member.alive for member in ranked)
    if gone:
        return f"{len(ranked) - gone} of {len(ranked)} ranks work, {gone} left"
    return "The one rank works" if len(ranked) == 1 else f"All {len(ranked)} ranks work"


def _without_a_generation(members: Sequence[Member]) -> str:
    if any(member.alive for member in members):
        return "The first round is still open"
    return "No round was completed, and nobody is left" if members else "Nobody has joined yet"


def _parts(reason: str) -> tuple[str, str]:
    """What stands before the first colon, outside of parentheses, and what after it."""
    depth = 0
    for place, character in enumerate(reason):
        depth += (character == "(") - (character == ")")
        if not depth and reason.startswith(": ", place):
            return reason[:place], reason[place + 2 :]
    return reason, ""


def _barrier(barrier: session_pb2.BarrierStatus, ranked: Iterable[Member]) -> Sequence[str]:
    missing = barrier.missing_ranks
    who = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks"
    named = [member for member in ranked if member.rank in missing[:_RANKS_NAMED]]
    told = [f"{_place(member)}{f' was last seen in {member.activity}' if member.activity else ''}" for member in named]
    return "warn", f"Barrier {barrier.name} has waited {barrier.age_ms / 1000:.1f} s for {who}", *told


def _behind(longest: Sequence[Member], duration_ns: int, others: str) -> Sequence[str]:
    """`longest`: the members that are behind, the longest first."""
    who = f"Rank {longest[0].rank} has" if len(longest) == 1 else f"{len(longest)} ranks have"
    told = [
        f"{_place(member)} is at step {member.step}, its last operation: {member.activity or 'none'}"
        for member in longest[:_RANKS_NAMED]
    ]
    return "warn", f"{who} been behind for {duration_ns / SECOND:.0f} s", others, *told


def _place(member: Member) -> str:
    return f"rank {member.rank} on {member.host or '?'}"
