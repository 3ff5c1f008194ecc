"""How the ranks of a generation find out who shares memory with whom, so that all of them draw the same conclusions.

Two rounds, in which every rank tells all others one small value: first what it offers, then, once it has tried everybody who
may be on its host, whom it has proven. Where the offers leave no two ranks to try, the second round is left out, everywhere.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from ferrorpc.errors import BackendUnavailableError, CodecError, FerroError, PeerLostError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.shared_memory.host_identity import HostIdentity, own_identity, unsupported_reason
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from ferrorpc.transports.shared_memory.hosts import Hosts, Offer, Verdict, candidate_hosts, confirmed_hosts, separation_reason
from ferrorpc.types import Assignment
from ferrorpc.v1 import shared_memory_pb2

if TYPE_CHECKING:
    import socket

    from ferrorpc.transports.shared_memory.handshake import Handshaker, HostPeer
    from ferrorpc.transports.shared_memory.segment import Segment

Exchange = Callable[[str, bytes], list[bytes]]
"""Tells every rank a value of at most 4 KiB and returns everybody's, in rank order: `Session.barrier`."""

_OFFERS: Final = "ferrorpc/shared_memory/offers"
_VERDICTS: Final = "ferrorpc/shared_memory/verdicts"
_NONCE_BYTES: Final = 32
_REASON_CHARACTERS: Final = 500
_NOWHERE: Final = HostIdentity("", 0, 0)

_log = logging.getLogger("ferrorpc.shared_memory")


def discover_host_peers(assignment: Assignment, transport: str, exchange: Exchange, latch: Latch, clock: Clock) -> HostPeers:
    """Finds this rank's host_peers. Every rank of the generation must call it, whatever its transport.

    Args:
        transport: "auto", "grpc" (shares nothing), or "shared_memory" on ranks that demand that the world is one host.

    A generation that ends meanwhile gives a rank no host_peers; its latch tells the cause to whatever comes next.

    Raises:
        BackendUnavailableError: some rank demanded shared memory, and not all ranks share it; on every rank.
        BarrierTimeoutError: naming who did not call it.
    """
    local = _LocalOffer(assignment, transport)
    try:
        found = _find(local, assignment, exchange, latch, clock)
        _check_demands(found)
    except FerroError as error:
        local.close()
        if latch.cause is None and not isinstance(error, PeerLostError):
            raise
        found = _Outcome([], tuple((rank,) for rank in range(assignment.size)), error.message)
    except BaseException:
        local.close()
        raise
    mine = next(host for host in found.hosts if assignment.rank in host)
    if assignment.size > 1:
        _log.info("rank %d shares memory with ranks %s%s", assignment.rank, mine, f"; {found.reason}" if found.reason else "")
    return HostPeers(assignment.rank, found.hosts, *local.keep(mine), found.reason, latch, clock)


class _Outcome(NamedTuple):
    """What all ranks have told, and what follows from it."""

    offers: Sequence[Offer]
    hosts: Hosts
    reason: str


def _find(local: _LocalOffer, assignment: Assignment, exchange: Exchange, latch: Latch, clock: Clock) -> _Outcome:
    """The two rounds."""
    offers = [_offer_in(data) for data in exchange(_OFFERS, local.offer.SerializeToString())]
    hosts = candidate_hosts(offers)
    verdicts: dict[int, Verdict] = {}
    if any(len(host) > 1 for host in hosts):
        own = local.prove_peers(next(host for host in hosts if assignment.rank in host), offers, latch, clock)
        verdicts = dict(enumerate(_verdict_in(data) for data in exchange(_VERDICTS, own.SerializeToString())))
        hosts = confirmed_hosts(hosts, verdicts)
    return _Outcome(offers, hosts, separation_reason(offers, hosts, verdicts))


class _LocalOffer:
    """What this rank puts up for others: its segment and its socket."""

    def __init__(self, assignment: Assignment, transport: str) -> None:
        self._assignment = assignment
        self._segment: Segment | None = None
        self._listener: socket.socket | None = None
        self._handshaker: Handshaker | None = None
        self.offer = shared_memory_pb2.SharedMemoryOffer(transport=transport)
        refusal = unsupported_reason() or ("it is alone" if assignment.size == 1 else "")
        if transport != "grpc" and not refusal:
            refusal = self._prepare()
        self.offer.refusal = refusal

    def _prepare(self) -> str:
        """Fills the offer; returns why it cannot."""
        from ferrorpc.transports.shared_memory import handshake, segment

        mine, here = self._assignment, own_identity()
        name = f"ferrorpc/{mine.job[:32]}/{mine.generation}/{mine.rank}/{secrets.token_hex(8)}"
        try:
            self._listener = handshake.listen(name)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            label = f"ferrorpc-{mine.generation}-{mine.rank}"
            self._segment = segment.Segment(label, nonce, segment.default_bytes(mine.size))
        except (OSError, BackendUnavailableError) as error:
            return error.message if isinstance(error, FerroError) else f"it cannot listen on a Unix socket: {error.strerror}"
        self.offer.boot_id, self.offer.network_namespace, self.offer.user = here
        self.offer.socket, self.offer.nonce = name, nonce
        return ""

    def prove_peers(
        self, host: Sequence[int], offers: Sequence[Offer], latch: Latch, clock: Clock
    ) -> shared_memory_pb2.SharedMemoryVerdict:
        """Greets all who may be on this host; returns what to tell."""
        if self._segment is None or self._listener is None or len(host) == 1:
            return shared_memory_pb2.SharedMemoryVerdict()
        from ferrorpc.transports.shared_memory.handshake import Handshaker

        handshaker = Handshaker(self._assignment, host, dict(enumerate(offers)), self._listener, self._segment)
        self._handshaker = handshaker
        handshaker.run(latch, clock)
        return _verdict(handshaker.host_peers, handshaker.failures)

    def keep(self, host: Sequence[int]) -> tuple[Segment | None, list[HostPeer]]:
        """What the host_peers need; everything else is given back."""
        proven = [] if self._handshaker is None else list(self._handshaker.host_peers.values())
        kept = [host_peer for host_peer in proven if host_peer.rank in host]
        for host_peer in proven:
            if host_peer not in kept:
                host_peer.close()
        if self._listener is not None:
            self._listener.close()
        if self._segment is not None and not kept:
            self._segment.close()
            self._segment = None
        return self._segment, kept

    def close(self) -> None:
        """Nothing came of it."""
        self.keep(())


def _verdict(host_peers: Mapping[int, HostPeer], failures: Mapping[int, str]) -> shared_memory_pb2.SharedMemoryVerdict:
    reason = "; ".join(failures.values())[:_REASON_CHARACTERS]
    return shared_memory_pb2.SharedMemoryVerdict(proven=sorted(host_peers), reason=reason)


def _offer_in(data: bytes) -> Offer:
    try:
        offer = shared_memory_pb2.SharedMemoryOffer.FromString(data)
    except DecodeError:
        raise CodecError("a rank's offer of shared memory is no message of ours") from None
    where = HostIdentity(offer.boot_id, offer.network_namespace, offer.user)
    return Offer(offer.transport, offer.refusal, where, offer.socket, offer.nonce)


def _verdict_in(data: bytes) -> Verdict:
    try:
        verdict = shared_memory_pb2.SharedMemoryVerdict.FromString(data)
    except DecodeError:
        raise CodecError("a rank's verdict on shared memory is no message of ours") from None
    return Verdict(frozenset(verdict.proven), verdict.reason)


def _check_demands(found: _Outcome) -> None:
    """Refuses a world that is not one host where a rank demanded it."""
    demanding = [rank for rank, offer in enumerate(found.offers) if offer.transport == "shared_memory"]
    if demanding and len(found.hosts) > 1:
        raise BackendUnavailableError(
            f"transport='shared_memory' (rank {demanding[0]}) needs all ranks to share one host's memory: {found.reason}",
            "use transport='auto', which shares memory where it can and sends over gRPC elsewhere",
        )
