"""The wait of a rank that closes for the peers that have yet to read what it sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from typing import Final

from ferrorpc.guard import Guard

_log = logging.getLogger("ferrorpc.transports")

READER_POLL_SECONDS: Final = 0.5
"""How often a closing rank looks whether it still has to wait for its peers."""

EXPLAIN_SECONDS: Final = 5.0
"""After how long it logs for whom."""


def wait_for_readers(
    rank: int, unread: Callable[[], dict[int, Callable[[float], object]]], unawaited: Container[int], guard: Guard
) -> None:
    """Waits until nothing is unread, but not for peers while they are `unawaited`. Logs for whom, and that it gave up.

    Args:
        unread: returns, by each peer that has not read all, what waits for that, at most so many seconds; nobody once the
            generation has ended.
        guard: of this wait.
    """
    explain_at = guard.started + EXPLAIN_SECONDS
    while (now := guard.clock.now()) < guard.deadline:
        awaited = {peer: wait for peer, wait in unread().items() if peer not in unawaited}
        if not awaited:
            break
        if now >= explain_at:
            explain_at = guard.deadline
            _log.warning("rank %d closes once %s received all that it sent", rank, _have(awaited))
        wait = next(iter(awaited.values()))
        wait(min(READER_POLL_SECONDS, guard.deadline - now))
    if guard.latch.cause is None and (left := unread()):
        what = "rank %d closes after %.1f s, before %s confirmed that all it sent arrived"
        _log.warning(what, rank, guard.waited, _have(left))


def _have(ranks: Iterable[int]) -> str:
    """These ranks with the verb, such as "rank 2 has"."""
    peers = sorted(ranks)
    return f"rank {peers[0]} has" if len(peers) == 1 else f"ranks {peers} have"
