"""Which ranks have closed their groups, and how many operations they had launched by then.

A rank that closes has waited until its own GPU has finished everything that it launched. On another rank the same operation may
take longer, because that rank's GPU is busy with something else, and NCCL does not tell this from waiting for a peer. So a rank
that closes writes into the job's store how many operations each of its launch queues has had. Those are the same operations in
the same order on every rank, so the others know for which of theirs they need not ask it any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from ferrorpc.coordination.base import Session
from ferrorpc.errors import FerroError
from ferrorpc.wire.frames import Key

LEAVE_SECONDS: Final = 0.5
"""How long writing to the store may take: a process that exits has about two seconds for everything."""
CLOSED_MAX: Final = 10_000
"""Groups that a rank has closed and tells of: what it writes must fit a value of the store. What older ones launched has been
over for long."""

Counts = list[int]
"""How many operations of a group were launched: those in program order, and those of streams."""


class Departures:
    """The departures of one generation, as one rank knows them, for all its groups."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._own: dict[int, Callable[[], Counts | None]] = {}
        """Of groups that are open."""
        self._closed: dict[int, Counts] = {}
        """Of groups that are closed, in the order in which they were."""
        self._heard: dict[int, dict[str, Counts]] = {}

    def register(self, group: int, counts: Callable[[], Counts | None]) -> None:
        """Adds a group of this rank. `counts` returns None while an operation of the group is in flight."""
        self._own[group] = counts

    def close(self, group: int) -> None:
        """Notes the final counts of a group for which nothing will be launched any more."""
        own = self._own.pop(group, None)  # closed before, by a close() that was interrupted
        counts = None if own is None else own()
        if counts is not None:
            self._closed[group] = counts
            if len(self._closed) > CLOSED_MAX:
                del self._closed[next(iter(self._closed))]

    def leave(self) -> None:
        """Publishes this rank's counts. May block. Raises FerroError if the store is not available."""
        own = {group: counts() for group, counts in list(self._own.items())}
        said = self._closed | {group: counts for group, counts in own.items() if counts is not None}
        rank = self._session.membership.assignment.rank
        self._session.store.set(f"{self._prefix}{rank}", json.dumps(said).encode(), bind="generation")

    def still_needed(self, ranks: Sequence[int], key: Key, number: int) -> list[int]:
        """Those of these world ranks that the operation with this number in its launch queue may still need. May block."""
        try:
            for name in self._session.store.keys(self._prefix):
                rank = int(name.removeprefix(self._prefix))
                if rank not in self._heard:
                    self._heard[rank] = json.loads(self._session.store.get(name, 0))
        except (FerroError, ValueError):  # then all are needed
            pass
        group, order = str(key.group), int(key.stream > 0)
        return [rank for rank in ranks if self._heard.get(rank, {}).get(group, [0, 0])[order] <= number]

    @property
    def _prefix(self) -> str:
        return f"ferrorpc/device/{self._session.membership.assignment.generation}/left/"
