"""Groups the ranks of the world into hosts, from the offers and verdicts of all ranks. Pure, so every rank gets the same
result.

Two ranks are host peers when each has proven the other. A host is a set of ranks in which all pairs are host peers. Where pairs
are missing in a candidate host, the rank with the most missing pairs is removed until none is missing: where one rank among
many fails, that is the one. Each removed rank becomes a host of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ferrorpc.transports.shared_memory.host_identity import HostIdentity
from ferrorpc.v1.shared_memory_pb2 import SharedMemoryOffer, SharedMemoryVerdict

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each host. Every rank of the world is in one tuple; ranks ascend, and hosts by their first rank."""


def candidate_hosts(offers: Sequence[SharedMemoryOffer]) -> Hosts:
    """The hosts by offers alone: ranks that are willing and have equal identities are together, others are alone."""
    willing: dict[HostIdentity, list[int]] = {}
    for rank, offer in enumerate(offers):
        if not _refusal(offer):
            willing.setdefault(_identity(offer), []).append(rank)
    return _with_the_rest(list(willing.values()), len(offers))


def confirmed_hosts(tried: Hosts, verdicts: Sequence[SharedMemoryVerdict]) -> Hosts:
    """The hosts that share memory, once all ranks have done their handshakes."""
    proven = [frozenset(verdict.proven) for verdict in verdicts]
    return _with_the_rest([_all_pairs(host, proven) for host in tried], len(proven))


def separation_reason(offers: Sequence[SharedMemoryOffer], hosts: Hosts, verdicts: Sequence[SharedMemoryVerdict]) -> str:
    """Why the world is not one host, as text; empty when it is."""
    if len(hosts) == 1:
        return ""
    unwilling = [f"rank {rank}: {_refusal(offer)}" for rank, offer in enumerate(offers) if _refusal(offer)]
    failed = [f"rank {rank}: {verdict.reason}" for rank, verdict in enumerate(verdicts) if verdict.reason]
    places = len({_identity(offer) for offer in offers if not _refusal(offer)})
    apart = [f"the ranks are in {places} places (hosts, network namespaces or users)"] if places > 1 else []
    return "; ".join(unwilling + apart + failed)


def _refusal(offer: SharedMemoryOffer) -> str:
    """Why a rank shares no memory; empty when it is willing to."""
    return "it was told to use transport='grpc'" if offer.transport == "grpc" else offer.refusal


def _identity(offer: SharedMemoryOffer) -> HostIdentity:
    return HostIdentity(offer.boot_id, offer.network_namespace, offer.user)


def _all_pairs(host: Sequence[int], proven: Sequence[frozenset[int]]) -> list[int]:
    """The part of a candidate host in which every pair is proven on both sides: large, but found greedily."""
    members = list(host)
    while True:
        missing = {
            rank: sum(not (other in proven[rank] and rank in proven[other]) for other in members if other != rank)
            for rank in members
        }
        worst = max(members, key=lambda rank: (missing[rank], rank))
        if missing[worst] == 0:
            return members
        members.remove(worst)


def _with_the_rest(sets: list[list[int]], size: int) -> Hosts:
    together = [tuple(sorted(members)) for members in sets if members]
    placed = {rank for host in together for rank in host}
    return tuple(sorted(together + [(rank,) for rank in range(size) if rank not in placed]))
