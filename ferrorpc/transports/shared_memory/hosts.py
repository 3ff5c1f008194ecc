"""Groups the ranks of the world into hosts, from the offers and verdicts of all ranks. Pure, so every rank gets the same
result.

Two ranks are host peers when each has proven the other. A host is a set of ranks in which all pairs are host peers. Where pairs
are missing in a candidate host, the rank with the most missing pairs is removed until none is missing: where one rank among
many fails, that is the one. Each removed rank becomes a host of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ferrorpc.transports.shared_memory.host_identity import HostIdentity

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each host. Every rank of the world is in one tuple; ranks ascend, and hosts by their first rank."""


class Offer(NamedTuple):
    """What a rank has sent in the first round."""

    transport: str
    refusal: str
    identity: HostIdentity
    socket: str = ""
    nonce: bytes = b""

    @property
    def refusal_reason(self) -> str:
        """Why this rank shares no memory; empty when it is willing to."""
        return "it was told to use transport='grpc'" if self.transport == "grpc" else self.refusal


class Verdict(NamedTuple):
    """What a rank has sent in the second round."""

    proven: frozenset[int] = frozenset()
    reason: str = ""


def candidate_hosts(offers: Sequence[Offer]) -> Hosts:
    """The hosts by offers alone: ranks that are willing and have equal identities are together, others are alone."""
    willing: dict[HostIdentity, list[int]] = {}
    for rank, offer in enumerate(offers):
        if not offer.refusal_reason:
            willing.setdefault(offer.identity, []).append(rank)
    return _with_the_rest(list(willing.values()), len(offers))


def confirmed_hosts(tried: Hosts, verdicts: Sequence[Verdict]) -> Hosts:
    """The hosts that share memory, once all ranks have done their handshakes."""
    size = sum(len(host) for host in tried)
    return _with_the_rest([_all_pairs(host, verdicts) for host in tried], size)


def separation_reason(offers: Sequence[Offer], hosts: Hosts, verdicts: Sequence[Verdict]) -> str:
    """Why the world is not one host, as text; empty when it is."""
    if len(hosts) == 1:
        return ""
    unwilling = [f"rank {rank}: {offer.refusal_reason}" for rank, offer in enumerate(offers) if offer.refusal_reason]
    failed = [f"rank {rank}: {verdict.reason}" for rank, verdict in enumerate(verdicts) if verdict.reason]
    places = len({offer.identity for offer in offers if not offer.refusal_reason})
    apart = [f"the ranks are in {places} places (hosts, network namespaces or users)"] if places > 1 else []
    return "; ".join(unwilling + apart + failed)


def _all_pairs(host: Sequence[int], verdicts: Sequence[Verdict]) -> list[int]:
    """The part of a candidate host in which every pair is proven on both sides: large, but found greedily."""
    members = list(host)
    while True:
        missing = {rank: sum(not _mutual(rank, other, verdicts) for other in members if other != rank) for rank in members}
        worst = max(members, key=lambda rank: (missing[rank], rank))
        if missing[worst] == 0:
            return members
        members.remove(worst)


def _mutual(one: int, other: int, verdicts: Sequence[Verdict]) -> bool:
    return other in verdicts[one].proven and one in verdicts[other].proven


def _with_the_rest(sets: list[list[int]], size: int) -> Hosts:
    together = [tuple(sorted(members)) for members in sets if members]
    placed = {rank for host in together for rank in host}
    return tuple(sorted(together + [(rank,) for rank in range(size) if rank not in placed]))
