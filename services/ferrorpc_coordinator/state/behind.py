"""Which ranks are behind: the others wait for them, as far as heartbeats tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.settings import SECOND

BEHIND_NS: Final = 2 * SECOND
"""A rank is behind once it has held others up for this long."""
IN_STEP: Final = 64
"""Ranks at most this many operations apart are taken to work in step."""


def behind(members: Iterable[Member], now: int) -> dict[str, int]:
    """The members that are behind, by name, each with the nanoseconds for which it has been.

    Once a rank has waited in operations for BEHIND_NS, those are behind that for as long have neither begun one nor waited.

    Where no rank is seen to wait, as none is that leaves waiting to its GPU or awaits a Work, operations are counted: those are
    behind that begin none although another is further. When no rank begins any, the others wait for those behind if the ranks
    work in step. Ranks that do different work, such as pipeline stages, drift apart; they are behind only while others advance.
    """
    ranked = [member for member in members if member.rank >= 0 and member.alive]
    before = now - BEHIND_NS
    idle = [member for member in ranked if member.idle and member.step_since < before]
    first = min((member.waits_since for member in ranked if member.waits_since is not None), default=now)
    if first < before:
        return {member.name: now - max(member.step_since, first) for member in idle}
    steps = [member.step for member in ranked] or [0]
    if max(steps) - min(steps) > IN_STEP:
        before -= now - max(member.step_since for member in ranked)
    return {m.name: now - m.step_since for m in idle if m.step_since < before and m.step < max(steps)}
