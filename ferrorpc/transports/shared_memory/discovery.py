"""Discovery: the ranks of a generation find out which of them share memory, and all come to the same result.

There are two rounds, in each of which every rank sends one small value to all others. The first value is its offer. Then it
does a handshake with every rank that may be on its host; the second value says which ranks it has proven. Where the offers
leave no two ranks that might share memory, all ranks skip the second round.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ferrorpc.errors import BackendUnavailableError, FerroError, PeerLostError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.shared_memory.handshake import Handshaker, listen
from ferrorpc.transports.shared_memory.host_identity import own_identity, unsupported_reason
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from ferrorpc.transports.shared_memory.hosts import Hosts, candidate_hosts, confirmed_hosts, separation_reason
from ferrorpc.transports.shared_memory.link import Link
from ferrorpc.transports.shared_memory.segment import NONCE_BYTES, Segment, default_bytes
from ferrorpc.types import Assignment
from ferrorpc.v1.shared_memory_pb2 import SharedMemoryOffer, SharedMemoryVerdict
from ferrorpc.wire.parse import parse

Exchange = Callable[[str, bytes], list[bytes]]
"""All-gathers a value of at most 4 KiB a rank under a name, in rank order: `Session.barrier`."""

_OFFERS: Final = "ferrorpc/shared_memory/offers"
_VERDICTS: Final = "ferrorpc/shared_memory/verdicts"
_REASON_CHARACTERS: Final = 500

_log = logging.getLogger("ferrorpc.shared_memory")


def discover_host_peers(assignment: Assignment, transport: str, exchange: Exchange, latch: Latch, clock: Clock) -> HostPeers:
    """Finds this rank's host peers. Every rank of the generation must call it, whatever its transport.

    Where the generation ends meanwhile, the rank gets no host peers; whatever it does next raises the cause from the latch.

    Args:
        transport: "auto", "grpc" (shares nothing), or "shared_memory" (the whole world must be on one host).

    Raises:
        BackendUnavailableError: on every rank, where some rank demanded shared memory and not all ranks share it.
        BarrierTimeoutError: names the ranks that did not call it.
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
    """What all ranks have sent, and the hosts that follow from it."""

    offers: Sequence[SharedMemoryOffer]
    hosts: Hosts
    reason: str


def _find(local: _LocalOffer, assignment: Assignment, exchange: Exchange, latch: Latch, clock: Clock) -> _Outcome:
    """Runs the two rounds."""
    said = exchange(_OFFERS, local.offer.SerializeToString())
    offers = [parse(SharedMemoryOffer, data, "a rank's offer of shared memory is no message of ours") for data in said]
    hosts = candidate_hosts(offers)
    verdicts: list[SharedMemoryVerdict] = []
    if any(len(host) > 1 for host in hosts):
        own = local.prove_peers(next(host for host in hosts if assignment.rank in host), offers, latch, clock)
        if own.reason and latch.cause is None:
            _log.warning("rank %d uses gRPC to ranks of its own host: %s", assignment.rank, own.reason)
        said = exchange(_VERDICTS, own.SerializeToString())
        verdicts = [
            parse(SharedMemoryVerdict, data, "a rank's verdict on shared memory is no message of ours") for data in said
        ]
        hosts = confirmed_hosts(hosts, verdicts)
    return _Outcome(offers, hosts, separation_reason(offers, hosts, verdicts))


class _LocalOffer:
    """This rank's offer: its segment, and the socket on which it listens."""

    def __init__(self, assignment: Assignment, transport: str) -> None:
        self._assignment = assignment
        self._segment: Segment | None = None
        self._listener: socket.socket | None = None
        self._handshaker: Handshaker | None = None
        self.offer = SharedMemoryOffer(transport=transport)
        refusal = unsupported_reason() or ("it is alone" if assignment.size == 1 else "")
        if transport != "grpc" and not refusal:
            refusal = self._prepare()
        self.offer.refusal = refusal

    def _prepare(self) -> str:
        """Fills the offer. Returns why it cannot; empty when it could."""
        mine, here = self._assignment, own_identity()
        name = f"ferrorpc/{mine.job[:32]}/{mine.generation}/{mine.rank}/{secrets.token_hex(8)}"
        try:
            self._listener = listen(name)
            nonce = secrets.token_bytes(NONCE_BYTES)
            label = f"ferrorpc-{mine.generation}-{mine.rank}"
            self._segment = Segment(label, nonce, default_bytes(mine.size))
        except (OSError, BackendUnavailableError) as error:
            return error.message if isinstance(error, FerroError) else f"it cannot listen on a Unix socket: {error.strerror}"
        self.offer.boot_id, self.offer.network_namespace, self.offer.user = here
        self.offer.socket, self.offer.nonce = name, nonce
        return ""

    def prove_peers(
        self, host: Sequence[int], offers: Sequence[SharedMemoryOffer], latch: Latch, clock: Clock
    ) -> SharedMemoryVerdict:
        """Does the handshakes with all ranks that may be on this host. Returns the verdict to send."""
        if self._segment is None or self._listener is None or len(host) == 1:
            return SharedMemoryVerdict()
        try:
            handshaker = Handshaker(self._assignment, host, offers, self._listener, self._segment)
        except OSError as error:
            self._listener.close()  # hangs up on whoever dials, who then need not wait
            return _verdict({}, {self._assignment.rank: f"it cannot greet its peers: {error.strerror}"})
        self._handshaker = handshaker
        handshaker.run(latch, clock)
        return _verdict(handshaker.links, handshaker.failures)

    def keep(self, host: Sequence[int]) -> tuple[Segment | None, dict[int, Link]]:
        """This rank's segment and its links to the proven peers on `host`, by rank. Closes everything else."""
        proven = {} if self._handshaker is None else self._handshaker.links
        kept = {rank: link for rank, link in proven.items() if rank in host}
        for rank in proven.keys() - kept:
            proven[rank].close()
        if self._listener is not None:
            self._listener.close()
        if self._segment is not None and not kept:
            self._segment.close()
            self._segment = None
        return self._segment, kept

    def close(self) -> None:
        """Closes everything."""
        self.keep(())


def _verdict(links: Mapping[int, Link], failures: Mapping[int, str]) -> SharedMemoryVerdict:
    reason = "; ".join(failures.values())[:_REASON_CHARACTERS]
    return SharedMemoryVerdict(proven=sorted(links), reason=reason)


def _check_demands(found: _Outcome) -> None:
    """Raises where a rank demanded shared memory and the world is not one host."""
    demanding = [rank for rank, offer in enumerate(found.offers) if offer.transport == "shared_memory"]
    if demanding and len(found.hosts) > 1:
        raise BackendUnavailableError(
            f"transport='shared_memory' (rank {demanding[0]}) needs all ranks to share one host's memory: {found.reason}",
            "use transport='auto', which shares memory where it can and sends over gRPC elsewhere",
        )
