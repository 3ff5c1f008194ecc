"""Relays NCCL unique ids from the ranks that create them to the ranks that need them, within one generation.

Of the participants every 128th, beginning with the first, is a leader and creates one id (NCCL takes several roots for large
worlds). The ids are opaque, secret and useless after the generation: they are kept in memory only, and never logged or
journaled. A leader that cannot create an id reports why, and all participants get that reason; a retry is another attempt with
new ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from ferrorpc.errors import CollectiveTimeoutError, NcclError, PeerLostError, UsageError, require
from ferrorpc.v1 import error_pb2, nccl_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.limits import NCCL_ID_BYTES, RANKS_PER_NCCL_ID
from ferrorpc_coordinator.state.context import JobContext, Requester
from ferrorpc_coordinator.state.generations import Generation
from ferrorpc_coordinator.state.settings import MILLISECOND, format_seconds

COMMUNICATORS_MAX: Final = 1_024
FAILURE_CHARACTERS_MAX: Final = 4_096
"""A leader's reason for having no id is kept for each communicator until the generation is over."""


class Key(NamedTuple):
    """One attempt to initialise a communicator."""

    communicator: str
    attempt: int


@dataclass(slots=True, eq=False)
class Exchange:
    """The ids received so far for one communicator. `outcome` is set once."""

    ranks: tuple[int, ...]
    ids: dict[int, bytes] = field(default_factory=dict)
    waiting: dict[int, Requester] = field(default_factory=dict)
    outcome: nccl_pb2.CommBootstrapResponse | error_pb2.ErrorDetail | None = None

    @property
    def leaders(self) -> tuple[int, ...]:
        """The world ranks that create ids, in the order of their ids."""
        return self.ranks[::RANKS_PER_NCCL_ID]


class NcclIdRelay:
    """The id exchanges of the job's newest generation."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._exchanges: dict[Key, Exchange] = {}

    def request(self, requester: Requester, request: nccl_pb2.CommBootstrapRequest, generation: Generation) -> None:
        """Takes a leader's ids, or a request for them; answers once all ids are there.

        Raises:
            UsageError: the request contradicts the communicator's ranks or earlier requests.
        """
        key = Key(request.communicator, request.attempt)
        rank = -1 if requester.member is None else requester.member.rank
        ranks = tuple(request.ranks) or generation.ranks
        if rank not in ranks or len(set(ranks)) != len(ranks) or max(ranks) >= len(generation.members):
            raise UsageError(
                f"{requester} (rank {rank}) asked for ids of communicator {key.communicator!r} of ranks {list(ranks)}"
            )
        exchange = self._exchanges.get(key)
        if exchange is None:
            most = COMMUNICATORS_MAX
            require("communicators of a generation", len(self._exchanges) + 1, "COMMUNICATORS_MAX", most)
            require("the communicator's name", len(request.communicator), "key_bytes", self._context.limits.key_bytes)
            exchange = self._exchanges[key] = Exchange(ranks)
        if exchange.ranks != ranks:
            raise UsageError(
                f"communicator {key.communicator!r} #{key.attempt}: {requester} names ranks {list(ranks)}, others "
                f"{list(exchange.ranks)}"
            )
        if exchange.outcome is None:
            self._offer(key, exchange, rank, request)
            self._fail_if_impossible(key, exchange, generation)
        if exchange.outcome is not None:
            self._context.answer_many([requester], exchange.outcome)
            return
        before = exchange.waiting.get(rank)
        if before is not None:
            again = UsageError(
                f"{requester} asked for the ids of communicator {key.communicator!r} again; the later request counts"
            )
            self._context.answer(before, detail_of(again))
        exchange.waiting[rank] = requester
        since = self._context.now
        until = since + request.timeout_ms * MILLISECOND
        self._context.arm(("bootstrap", key, rank), until, partial(self._time_out, key, rank, since))

    def member_gone(self, generation: Generation) -> None:
        """A member left a generation that goes on. Requests that wait for its ids fail."""
        for key, exchange in self._exchanges.items():
            self._fail_if_impossible(key, exchange, generation)

    def generation_over(self, cause: error_pb2.ErrorDetail) -> None:
        """The generation is over: waiting requests fail with its cause."""
        exchanges, self._exchanges = self._exchanges, {}
        for key, exchange in exchanges.items():
            self._finish(key, exchange, cause)

    def _offer(self, key: Key, exchange: Exchange, rank: int, request: nccl_pb2.CommBootstrapRequest) -> None:
        leaders = exchange.leaders
        if not request.unique_ids and not request.failure:
            return
        if rank not in leaders:
            raise UsageError(f"rank {rank} offered ids of communicator {key.communicator!r}, whose leaders are {list(leaders)}")
        if request.failure:
            why = request.failure[:FAILURE_CHARACTERS_MAX]
            text = f"rank {rank} could not create an id for communicator {key.communicator!r} #{key.attempt}: {why}"
            error = NcclError(text, rank=rank)
            self._finish(key, exchange, detail_of(error))
            return
        ids = list(request.unique_ids)
        if any(len(value) != NCCL_ID_BYTES for value in ids) or len(ids) not in (1, len(leaders)):
            most = len(leaders)
            raise UsageError(f"rank {rank} offered {len(ids)} ids; a leader offers one of {NCCL_ID_BYTES} bytes, or all {most}")
        targets = (rank,) if len(ids) == 1 else leaders
        exchange.ids.update(zip(targets, ids, strict=True))
        if len(exchange.ids) == len(leaders):
            in_order = [exchange.ids[leader] for leader in leaders]
            self._finish(key, exchange, nccl_pb2.CommBootstrapResponse(unique_ids=in_order))

    def _finish(self, key: Key, exchange: Exchange, outcome: nccl_pb2.CommBootstrapResponse | error_pb2.ErrorDetail) -> None:
        exchange.outcome = outcome
        for rank in exchange.waiting:
            self._context.disarm(("bootstrap", key, rank))
        self._context.answer_many(exchange.waiting.values(), outcome)
        exchange.waiting.clear()

    def _fail_if_impossible(self, key: Key, exchange: Exchange, generation: Generation) -> None:
        """Fails the exchange if a leader has left without offering its id."""
        gone = [rank for rank in exchange.leaders if rank in generation.departed and rank not in exchange.ids]
        if exchange.outcome is not None or not gone:
            return
        member = generation.members[gone[0]]
        why = member.reason or "it left the job"
        what = f"an id of communicator {key.communicator!r} #{key.attempt}"
        lost = PeerLostError(gone[0], why, f"rank {gone[0]} ({member}) left before it offered {what}: {why}")
        self._finish(key, exchange, detail_of(lost))

    def _time_out(self, key: Key, rank: int, since: int) -> None:
        exchange = self._exchanges[key]
        requester = exchange.waiting.pop(rank)
        missing = [leader for leader in exchange.leaders if leader not in exchange.ids]
        waited = format_seconds(self._context.now - since)
        text = f"rank {rank} waited {waited} for the ids of communicator {key.communicator!r}; not offered by leaders {missing}"
        self._context.answer(requester, detail_of(CollectiveTimeoutError(missing, text)))
