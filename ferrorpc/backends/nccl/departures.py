"""Who has left in good order, and what it had started by then: it is through with that, and nobody needs it for that any more.

A rank that closes has seen its GPU come past everything that it launched. For others the same operation may last: their own
GPU may be busy with something else, and NCCL does not say that this is all it waits for. So who leaves writes into the job's
store how many operations each of its lineups has had, which on every rank are the same ones in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from ferrorpc.coordination.base import Session
from ferrorpc.errors import FerroError
from ferrorpc.wire.frames import Key

LEAVE_SECONDS: Final = 0.5
"""How long to write that may take: a process that ends has about two seconds for all it does."""

Through = list[int]
"""How many operations a group has had in program order, and how many of streams."""


class Departures:
    """For one rank of one generation, and all its groups."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._own: dict[int, Callable[[], Through | None]] = {}
        self._heard: dict[int, dict[str, Through]] = {}

    def count(self, group: int, through: Callable[[], Through | None]) -> None:
        """A group of this rank's. `through`: None while something of it is in flight."""
        self._own[group] = through

    def close(self, group: int) -> None:
        """Nothing is launched for it any more: what it has had is all that is kept of it."""
        through = self._own[group]()
        self._own[group] = lambda: through

    def leave(self) -> None:
        """Tells the others. May block; raises FerroError where the store is not there."""
        own = {group: through() for group, through in self._own.items()}
        said = {group: through for group, through in own.items() if through is not None}
        rank = self._session.membership.assignment.rank
        self._session.store.set(f"{self._prefix}{rank}", json.dumps(said).encode(), bind="generation")

    def staying(self, ranks: Sequence[int], key: Key, number: int) -> list[int]:
        """Those of these world ranks that an operation with this number in its lineup may still need. May block."""
        try:
            for name in self._session.store.keys(self._prefix):
                rank = int(name.removeprefix(self._prefix))
                if rank not in self._heard:
                    self._heard[rank] = json.loads(self._session.store.get(name, 0))
        except (FerroError, ValueError):  # then all are asked
            pass
        return [rank for rank in ranks if self._through(rank, key) <= number]

    def _through(self, rank: int, key: Key) -> int:
        found = self._heard.get(rank, {}).get(str(key.group))
        return 0 if found is None else found[key.stream > 0]

    @property
    def _prefix(self) -> str:
        return f"ferrorpc/nccl/{self._session.membership.assignment.generation}/left/"
