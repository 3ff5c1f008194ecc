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
from ferrorpc.transports.shared_memory import place
from ferrorpc.transports.shared_memory.hosts import Hosts, Offer, Verdict, candidates, settle, why_not
from ferrorpc.transports.shared_memory.neighbours import Neighbours
from ferrorpc.types import Assignment
from ferrorpc.v1 import shared_memory_pb2

if TYPE_CHECKING:
    import socket

    from ferrorpc.transports.shared_memory.greeting import Greeter, Neighbour
    from ferrorpc.transports.shared_memory.segment import Segment

Exchange = Callable[[str, bytes], list[bytes]]
"""Tells every rank a value of at most 4 KiB and returns everybody's, in rank order: `Session.barrier`."""

_OFFERS: Final = "ferrorpc/shared_memory/offers"
_VERDICTS: Final = "ferrorpc/shared_memory/verdicts"
_NONCE_BYTES: Final = 32
_REASON_CHARACTERS: Final = 500
_NOWHERE: Final = place.Place("", 0, 0)

_log = logging.getLogger("ferrorpc.shared_memory")


def meet(assignment: Assignment, transport: str, exchange: Exchange, latch: Latch, clock: Clock) -> Neighbours:
    """Finds this rank's neighbours. Every rank of the generation must call it, whatever its transport.

    Args:
        transport: "auto", "grpc" (shares nothing), or "shared_memory" on ranks that demand that the world is one host.

    A generation that ends meanwhile gives a rank no neighbours; its latch tells the cause to whatever comes next.

    Raises:
        BackendUnavailableError: some rank demanded shared memory, and not all ranks share it; on every rank.
        BarrierTimeoutError: naming who did not call it.
    """
    stall = _Stall(assignment, transport)
    try:
        found = _find(stall, assignment, exchange, latch, clock)
        _check_demands(found)
    except FerroError as error:
        stall.close()
        if latch.cause is None and not isinstance(error, PeerLostError):
            raise
        found = _Found([], tuple((rank,) for rank in range(assignment.size)), error.message)
    except BaseException:
        stall.close()
        raise
    mine = next(host for host in found.hosts if assignment.rank in host)
    if assignment.size > 1:
        _log.info("rank %d shares memory with ranks %s%s", assignment.rank, mine, f"; {found.reason}" if found.reason else "")
    return Neighbours(assignment.rank, found.hosts, *stall.keep(mine), found.reason, latch, clock)


class _Found(NamedTuple):
    """What all ranks have told, and what follows from it."""

    offers: Sequence[Offer]
    hosts: Hosts
    reason: str


def _find(stall: _Stall, assignment: Assignment, exchange: Exchange, latch: Latch, clock: Clock) -> _Found:
    """The two rounds."""
    offers = [_offer_in(data) for data in exchange(_OFFERS, stall.offer.SerializeToString())]
    hosts = candidates(offers)
    verdicts: dict[int, Verdict] = {}
    if any(len(host) > 1 for host in hosts):
        own = stall.try_others(next(host for host in hosts if assignment.rank in host), offers, latch, clock)
        verdicts = dict(enumerate(_verdict_in(data) for data in exchange(_VERDICTS, own.SerializeToString())))
        hosts = settle(hosts, verdicts)
    return _Found(offers, hosts, why_not(offers, hosts, verdicts))


class _Stall:
    """What this rank puts up for others: its segment and its socket."""

    def __init__(self, assignment: Assignment, transport: str) -> None:
        self._assignment = assignment
        self._segment: Segment | None = None
        self._listener: socket.socket | None = None
        self._greeter: Greeter | None = None
        self.offer = shared_memory_pb2.SharedMemoryOffer(transport=transport)
        refusal = place.refusal() or ("it is alone" if assignment.size == 1 else "")
        if transport != "grpc" and not refusal:
            refusal = self._put_up()
        self.offer.refusal = refusal

    def _put_up(self) -> str:
        """Fills the offer; returns why it cannot."""
        from ferrorpc.transports.shared_memory import greeting, segment

        mine, here = self._assignment, place.here()
        name = f"ferrorpc/{mine.job[:32]}/{mine.generation}/{mine.rank}/{secrets.token_hex(8)}"
        try:
            self._listener = greeting.listen(name)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            label = f"ferrorpc-{mine.generation}-{mine.rank}"
            self._segment = segment.Segment(label, nonce, segment.usual_bytes(mine.size))
        except (OSError, BackendUnavailableError) as error:
            return error.message if isinstance(error, FerroError) else f"it cannot listen on a Unix socket: {error.strerror}"
        self.offer.boot_id, self.offer.network_namespace, self.offer.user = here
        self.offer.socket, self.offer.nonce = name, nonce
        return ""

    def try_others(
        self, host: Sequence[int], offers: Sequence[Offer], latch: Latch, clock: Clock
    ) -> shared_memory_pb2.SharedMemoryVerdict:
        """Greets all who may be on this host; returns what to tell."""
        if self._segment is None or self._listener is None or len(host) == 1:
            return shared_memory_pb2.SharedMemoryVerdict()
        from ferrorpc.transports.shared_memory.greeting import Greeter

        greeter = Greeter(self._assignment, host, dict(enumerate(offers)), self._listener, self._segment)
        self._greeter = greeter
        greeter.run(latch, clock)
        return _verdict(greeter.neighbours, greeter.failures)

    def keep(self, host: Sequence[int]) -> tuple[Segment | None, list[Neighbour]]:
        """What the neighbours need; everything else is given back."""
        proven = [] if self._greeter is None else list(self._greeter.neighbours.values())
        kept = [neighbour for neighbour in proven if neighbour.rank in host]
        for neighbour in proven:
            if neighbour not in kept:
                neighbour.close()
        if self._listener is not None:
            self._listener.close()
        if self._segment is not None and not kept:
            self._segment.close()
            self._segment = None
        return self._segment, kept

    def close(self) -> None:
        """Nothing came of it."""
        self.keep(())


def _verdict(neighbours: Mapping[int, Neighbour], failures: Mapping[int, str]) -> shared_memory_pb2.SharedMemoryVerdict:
    reason = "; ".join(failures.values())[:_REASON_CHARACTERS]
    return shared_memory_pb2.SharedMemoryVerdict(proven=sorted(neighbours), reason=reason)


def _offer_in(data: bytes) -> Offer:
    try:
        offer = shared_memory_pb2.SharedMemoryOffer.FromString(data)
    except DecodeError:
        raise CodecError("a rank's offer of shared memory is no message of ours") from None
    where = place.Place(offer.boot_id, offer.network_namespace, offer.user)
    return Offer(offer.transport, offer.refusal, where, offer.socket, offer.nonce)


def _verdict_in(data: bytes) -> Verdict:
    try:
        verdict = shared_memory_pb2.SharedMemoryVerdict.FromString(data)
    except DecodeError:
        raise CodecError("a rank's verdict on shared memory is no message of ours") from None
    return Verdict(frozenset(verdict.proven), verdict.reason)


def _check_demands(found: _Found) -> None:
    """Refuses a world that is not one host where a rank demanded it."""
    demanding = [rank for rank, offer in enumerate(found.offers) if offer.transport == "shared_memory"]
    if demanding and len(found.hosts) > 1:
        raise BackendUnavailableError(
            f"transport='shared_memory' (rank {demanding[0]}) needs all ranks to share one host's memory: {found.reason}",
            "use transport='auto', which shares memory where it can and sends over gRPC elsewhere",
        )
