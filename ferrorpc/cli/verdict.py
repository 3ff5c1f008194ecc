"""How a job is, in a sentence: what the status page has on top (web/static/model.js), in the same words, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ferrorpc.cli.lateness import GONE, lateness, state_of

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member
    from ferrorpc.v1.session_pb2 import BarrierStatus, StatusResponse

BEHIND_MS: Final = 5000
"""A rank that is behind for so long is worth a headline."""
BARRIER_MS: Final = 1000
"""So is a barrier that has waited for so long."""
_TOLD: Final = 3


def verdict(response: StatusResponse) -> tuple[str, str]:
    """The headline, and what else there is to say."""
    seated = [member for member in response.members if member.rank >= 0]
    waiting = f"Next round: {response.waiting_reason}" if response.waiting_reason else ""
    if not response.generations:
        return ("The first round is still open" if response.members else "Nobody has joined yet"), waiting
    newest = response.generations[-1]
    if newest.end_reason:
        if seated and all(state_of(member) == "left" for member in seated):
            return "The job is over: all its members left", waiting
        what, _, why = newest.end_reason.partition(": ")
        return what[:1].upper() + what[1:], _joined(why, f"generation {newest.generation} is over", waiting)
    sick = [member for member in seated if state_of(member) in ("stalled", "suspect")]
    if sick:
        others = f", and {len(sick) - 1} more" if len(sick) > 1 else ""
        return f"Rank {sick[0].rank} is {state_of(sick[0])}{others}", _joined(sick[0].reason, waiting)
    late = [barrier for barrier in response.barriers if barrier.missing_ranks and barrier.age_ms > BARRIER_MS]
    if late:
        return _late(late[0], seated, waiting)
    return _behind(seated, waiting) or _well(seated, waiting)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _late(barrier: BarrierStatus, seated: Sequence[Member], waiting: str) -> tuple[str, str]:
    missing = list(barrier.missing_ranks)
    who = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks"
    told = [
        f"rank {member.rank} on {member.host or '?'}{f' was last seen in {member.activity}' if member.activity else ''}"
        for member in seated
        if member.rank in missing[:_TOLD]
    ]
    return f"Barrier {barrier.name} has waited {barrier.age_ms / 1000:.1f} s for {who}", _joined(*told, waiting)


def _behind(seated: Sequence[Member], waiting: str) -> tuple[str, str] | None:
    ages = lateness(seated)
    behind = sorted((member for member in seated if ages[member.name] > BEHIND_MS), key=lambda member: -ages[member.name])
    if not behind:
        return None
    who = f"Rank {behind[0].rank} has" if len(behind) == 1 else f"{len(behind)} ranks have"
    told = [
        f"rank {member.rank} on {member.host or '?'} is at step {member.step}, its last operation: {member.activity or 'none'}"
        for member in behind[:_TOLD]
    ]
    front = f"others are at step {max(member.step for member in seated)}"
    return f"{who} been behind for {ages[behind[0].name] / 1000:.0f} s", _joined(front, *told, waiting)


def _well(seated: Sequence[Member], waiting: str) -> tuple[str, str]:
    gone = sum(state_of(member) in GONE for member in seated)
    if gone:
        return f"{len(seated) - gone} of {len(seated)} ranks work, {gone} left", waiting
    return "The one rank works" if len(seated) == 1 else f"All {len(seated)} ranks work", waiting
