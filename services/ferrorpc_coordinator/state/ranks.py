"""Assigns ranks when a round closes: a pure function of the members' claims.

Claims, strongest first: a rank pinned by the launcher; the rank in the generation that ends; the last rank of this name; a
hint. Of two claims to one rank the stronger wins, then the earlier one. The remaining ranks go to the remaining members so that
members of one host get adjacent ranks, hosts and members in order of arrival.

In an elastic world a survivor gets rank 0, whose weights the others take when they wrap their modules again. In a fixed one a
replacement takes the rank that was lost, because ranks may do different work there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """The ranks that one member may claim; -1 for none."""

    host: str
    pinned: int = -1
    current: int = -1
    last: int = -1
    hinted: int = -1


def assign(claims: Sequence[Claim], size: int, elastic: bool = False) -> list[int]:
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
    ranks = [taken[index] for index in range(len(claims))]
    if elastic:
        _give_rank_0_to_a_survivor(claims, ranks)
    return ranks


def _give_rank_0_to_a_survivor(claims: Sequence[Claim], ranks: list[int]) -> None:
    """If a newcomer has rank 0, it changes with the first survivor. Pinned ranks stay."""
    first = ranks.index(0)
    survivors = [index for index, claim in enumerate(claims) if claim.current >= 0 and claim.pinned != ranks[index]]
    if survivors and claims[first].current < 0 and claims[first].pinned != 0:
        other = min(survivors, key=ranks.__getitem__)
        ranks[first], ranks[other] = ranks[other], 0


def claimed(claims: Sequence[Claim], size: int) -> dict[int, int]:
    """The claims that are granted: index of the claim -> rank."""
    taken: dict[int, int] = {}
    used: set[int] = set()
    for strength in ("pinned", "current", "last", "hinted"):
        for index, claim in enumerate(claims):
            rank = getattr(claim, strength)
            if index not in taken and 0 <= rank < size and rank not in used:
                taken[index] = rank
                used.add(rank)
    return taken
