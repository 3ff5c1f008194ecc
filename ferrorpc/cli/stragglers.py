"""Which ranks are behind: their step does not advance although another rank's is ahead. The status page uses the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member

BEHIND_MS: Final = 2000
"""A rank is behind once its step has been behind another's and has not advanced for this long."""
IN_STEP: Final = 64
"""Ranks at most this many operations apart are taken to work in step."""
GONE: Final = ("dead", "left")
"""States of members that have ended. Without a rank in the newest generation they belong to an earlier one."""


def state_name(member: Member) -> str:
    """The member's state as a word; "unknown" for one that only a newer coordinator knows."""
    from ferrorpc.v1.identity_pb2 import MemberState

    if member.state not in MemberState.values():
        return "unknown"
    return MemberState.Name(member.state).removeprefix("MEMBER_STATE_").lower()


def ms_behind(members: Sequence[Member]) -> dict[str, int]:
    """Member -> milliseconds for which its step has not advanced although another's is ahead; 0 if it keeps up.

    When no rank advances, the others wait for those behind if the ranks work in step. Ranks that do different work, such as
    pipeline stages, drift apart; they are behind only while others advance.
    """
    ranked = [member for member in members if member.rank >= 0 and state_name(member) not in GONE]
    steps = [member.step for member in ranked] or [0]
    furthest = max(steps)
    last_advance = min((member.step_age_ms for member in ranked), default=0)
    grace = BEHIND_MS + (0 if furthest - min(steps) <= IN_STEP else last_advance)
    behind = {member.name for member in ranked if member.step < furthest and member.step_age_ms > grace}
    return {member.name: member.step_age_ms if member.name in behind else 0 for member in members}
