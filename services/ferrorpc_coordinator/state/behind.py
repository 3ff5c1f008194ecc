"""Which ranks are behind: the others wait for them, as far as heartbeats tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.settings import SECOND

BEHIND_NS: Final = 2 * SECOND
"""A rank is behind once it has held others up for this long."""
IN_STEP: Final = 64
"""Ranks at most this many operations apart are taken to work in step."""


class Behind(NamedTuple):
    """Who is behind."""

    durations: dict[str, int]
    """Member's name -> nanoseconds for which it has been behind."""
    others: str
    """What the others do, for a headline."""


def behind(members: Iterable[Member], reforming: Mapping[str, int], now: int) -> Behind:
    """The members that are behind.

    Once most ranks have waited for BEHIND_NS, in operations or for the next generation, those are behind that for as long have
    neither waited nor begun an operation. A few may always wait: who gives others work, or receives their results.

    Where most are not seen to wait, as no rank is that leaves waiting to its GPU, awaits a Work, or waits beside its main
    thread, operations are counted: those are behind that begin none although another is further. Ranks that do different work,
    such as pipeline stages or actors, drift apart. Those that advance do not wait for the others: nobody is behind until all
    have stopped, and then those that had stopped BEHIND_NS before the last one.

    Args:
        members: those of a generation that goes on.
        reforming: since when members of these names have waited for the next generation.
    """
    ranked = [member for member in members if member.alive]
    before = now - BEHIND_NS
    working = [member for member in ranked if member.name not in reforming]
    idle = [(member, since) for member in working if (since := member.idle_since) is not None and since < before]
    waits = sorted([*reforming.values(), *(since for member in working if (since := member.waits_since) is not None)])
    most_wait_since = waits[len(ranked) // 2] if len(waits) > len(ranked) // 2 else now
    if most_wait_since < before:
        return Behind({member.name: now - max(since, most_wait_since) for member, since in idle}, "others wait")
    steps = [member.step for member in ranked] or [0]
    if max(steps) - min(steps) > IN_STEP:
        stopped = max(member.step_since for member in ranked)
        idle = [(member, stopped) for member, since in idle if since < stopped - BEHIND_NS and stopped < before]
    late = {member.name: now - since for member, since in idle if member.step < max(steps)}
    return Behind(late, f"others are at step {max(steps)}, and perhaps wait")
