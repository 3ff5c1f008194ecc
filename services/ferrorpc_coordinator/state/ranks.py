"""Who gets which rank when a round closes. A pure function of the claims.

Claims, strongest first: a rank its launcher pinned; the rank it has in the generation that ends; the last rank its name had;
a hint. Where claims meet, the stronger wins, then the earlier bid. The ranks that are left go to the others so that members
of one host stand side by side, hosts and members in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """What speaks for one bidder; -1 where nothing does."""

    host: str
    pinned: int = -1
    current: int = -1
    last: int = -1
    hinted: int = -1


def assign(claims: Sequence[Claim], size: int) -> list[int]:
    """The rank of each claim, for exactly `size` claims in order of arrival."""
    taken = claimed(claims, size)
    free = iter(sorted(set(range(size)) - set(taken.values())))
    hosts: dict[str, int] = {}
    for claim in claims:
        hosts.setdefault(claim.host, len(hosts))
    others = [index for index in range(len(claims)) if index not in taken]
    rest = sorted(others, key=lambda index: (hosts[claims[index].host], index))
    for index in rest:
        taken[index] = next(free)
    return [taken[index] for index in range(len(claims))]


def claimed(claims: Sequence[Claim], size: int) -> dict[int, int]:
    """Which claims get a rank they speak for: index of the claim -> rank."""
    taken: dict[int, int] = {}
    used: set[int] = set()
    for strength in ("pinned", "current", "last", "hinted"):
        for index, claim in enumerate(claims):
            rank = getattr(claim, strength)
            if index not in taken and 0 <= rank < size and rank not in used:
                taken[index] = rank
                used.add(rank)
    return taken
