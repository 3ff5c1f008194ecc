"""From offers and verdicts to hosts: who shares memory with whom, concluded alike on every rank from what all ranks said.

Pure. Two ranks are host_peers when each has proven the other; a host is a set in which all pairs are. Where a pair is missing,
the rank that lacks most leaves, again and again, until what remains is such a set: with one broken rank among many, that is it.
Whoever is left over is a host of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ferrorpc.transports.shared_memory.host_identity import HostIdentity

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""All ranks of the world, each in one tuple; ranks ascend within a host, hosts by their first rank."""


class Offer(NamedTuple):
    """What a rank said in the first round."""

    transport: str
    refusal: str
    identity: HostIdentity
    socket: str = ""
    nonce: bytes = b""

    @property
    def refusal_reason(self) -> str:
        """Why this rank shares no memory; empty when it would."""
        return "it was told to use transport='grpc'" if self.transport == "grpc" else self.refusal


class Verdict(NamedTuple):
    """What a rank said in the second round."""

    proven: frozenset[int] = frozenset()
    reason: str = ""


def candidate_hosts(offers: Sequence[Offer]) -> Hosts:
    """Who should try each other, by rank: the willing in one place; the others alone."""
    places: dict[HostIdentity, list[int]] = {}
    for rank, offer in enumerate(offers):
        if not offer.refusal_reason:
            places.setdefault(offer.identity, []).append(rank)
    return _with_the_rest(list(places.values()), len(offers))


def confirmed_hosts(tried: Hosts, verdicts: Mapping[int, Verdict]) -> Hosts:
    """Who shares memory, once everybody has tried its candidate_hosts."""
    size = sum(len(host) for host in tried)
    return _with_the_rest([_all_pairs(host, verdicts) for host in tried], size)


def separation_reason(offers: Sequence[Offer], hosts: Hosts, verdicts: Mapping[int, Verdict]) -> str:
    """Why the world is not one host, in words; empty when it is."""
    if len(hosts) == 1:
        return ""
    unwilling = [f"rank {rank}: {offer.refusal_reason}" for rank, offer in enumerate(offers) if offer.refusal_reason]
    failed = [f"rank {rank}: {verdict.reason}" for rank, verdict in sorted(verdicts.items()) if verdict.reason]
    places = len({offer.identity for offer in offers if not offer.refusal_reason})
    apart = [f"the ranks are in {places} places (hosts, network namespaces or users)"] if places > 1 else []
    return "; ".join(unwilling + apart + failed)


def _all_pairs(host: Sequence[int], verdicts: Mapping[int, Verdict]) -> list[int]:
    """The largest part of a host, found greedily, in which every pair is proven from both sides."""
    members = list(host)
    while True:
        missing = {rank: sum(not _mutual(rank, other, verdicts) for other in members if other != rank) for rank in members}
        worst = max(members, key=lambda rank: (missing[rank], rank))
        if missing[worst] == 0:
            return members
        members.remove(worst)


def _mutual(one: int, other: int, verdicts: Mapping[int, Verdict]) -> bool:
    return other in verdicts[one].proven and one in verdicts[other].proven


def _with_the_rest(sets: list[list[int]], size: int) -> Hosts:
    together = [tuple(sorted(members)) for members in sets if members]
    placed = {rank for host in together for rank in host}
    return tuple(sorted(together + [(rank,) for rank in range(size) if rank not in placed]))
