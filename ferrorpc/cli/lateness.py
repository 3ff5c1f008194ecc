"""Who is behind: whose step does not move though another one's is ahead, as the status page judges it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member

LATE_MS: Final = 2000
"""A rank that is behind and whose step did not move for so long is late."""
IN_STEP: Final = 64
"""Ranks that are at most so many operations apart work in step."""
GONE: Final = ("dead", "left")
"""Whoever is, and has no rank in the newest generation, is of an earlier one."""


def state_of(member: Member) -> str:
    """The member's state as a word."""
    from ferrorpc.v1.identity_pb2 import MemberState

    return MemberState.Name(member.state).removeprefix("MEMBER_STATE_").lower()


def lateness(members: Sequence[Member]) -> dict[str, int]:
    """Member -> milliseconds for which its step has not moved though another one's is ahead; 0 where it keeps up.

    Where all stand, the others wait for those behind if the ranks work in step. Ranks that do different things, such as stages
    of a pipeline, drift apart; they are late only while others move.
    """
    seated = [member for member in members if member.rank >= 0 and state_of(member) not in GONE]
    steps = [member.step for member in seated] or [0]
    front = max(steps)
    moved = min((member.step_age_ms for member in seated), default=0)
    grace = LATE_MS + (0 if front - min(steps) <= IN_STEP else moved)
    late = {member.name for member in seated if member.step < front and member.step_age_ms > grace}
    return {member.name: member.step_age_ms if member.name in late else 0 for member in members}
