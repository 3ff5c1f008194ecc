"""A job's state in one sentence: the headline of the status page (web/static/model.js), in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ferrorpc.cli.stragglers import GONE, ms_behind, state_name

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member
    from ferrorpc.v1.session_pb2 import BarrierStatus, StatusResponse

BEHIND_HEADLINE_MS: Final = 5000
"""A rank that has been behind for longer gets a headline."""
BARRIER_HEADLINE_MS: Final = 1000
"""A barrier that has waited for longer gets a headline."""
_RANKS_NAMED: Final = 3


def headline(response: StatusResponse) -> tuple[str, str]:
    """The headline, and further details."""
    members = [member for member in response.members if member.rank >= 0]
    waiting = f"Next round: {response.waiting_reason}" if response.waiting_reason else ""
    if not response.generations:
        return ("The first round is still open" if response.members else "Nobody has joined yet"), waiting
    newest = response.generations[-1]
    if newest.end_reason:
        if members and all(state_name(member) == "left" for member in members):
            return "The job is over: all its members left", waiting
        what, _, why = newest.end_reason.partition(": ")
        return what[:1].upper() + what[1:], _joined(why, f"generation {newest.generation} is over", waiting)
    unwell = [member for member in members if state_name(member) in ("stalled", "suspect")]
    if unwell:
        others = f", and {len(unwell) - 1} more" if len(unwell) > 1 else ""
        return f"Rank {unwell[0].rank} is {state_name(unwell[0])}{others}", _joined(unwell[0].reason, waiting)
    late = [barrier for barrier in response.barriers if barrier.missing_ranks and barrier.age_ms > BARRIER_HEADLINE_MS]
    if late:
        return _late(late[0], members, waiting)
    return _behind(members, waiting) or _healthy(members, waiting)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _late(barrier: BarrierStatus, members: Sequence[Member], waiting: str) -> tuple[str, str]:
    missing = list(barrier.missing_ranks)
    who = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks"
    told = [
        f"rank {member.rank} on {member.host or '?'}{f' was last seen in {member.activity}' if member.activity else ''}"
        for member in members
        if member.rank in missing[:_RANKS_NAMED]
    ]
    return f"Barrier {barrier.name} has waited {barrier.age_ms / 1000:.1f} s for {who}", _joined(*told, waiting)


def _behind(members: Sequence[Member], waiting: str) -> tuple[str, str] | None:
    ages = ms_behind(members)
    behind = sorted(
        (member for member in members if ages[member.name] > BEHIND_HEADLINE_MS), key=lambda member: -ages[member.name]
    )
    if not behind:
        return None
    who = f"Rank {behind[0].rank} has" if len(behind) == 1 else f"{len(behind)} ranks have"
    told = [
        f"rank {member.rank} on {member.host or '?'} is at step {member.step}, its last operation: {member.activity or 'none'}"
        for member in behind[:_RANKS_NAMED]
    ]
    front = f"others are at step {max(member.step for member in members)}"
    return f"{who} been behind for {ages[behind[0].name] / 1000:.0f} s", _joined(front, *told, waiting)


def _healthy(members: Sequence[Member], waiting: str) -> tuple[str, str]:
    gone = sum(state_name(member) in GONE for member in members)
    if gone:
        return f"{len(members) - gone} of {len(members)} ranks work, {gone} left", waiting
    return "The one rank works" if len(members) == 1 else f"All {len(members)} ranks work", waiting
