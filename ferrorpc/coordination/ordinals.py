"""Numbers the uses of barriers' names, so that the n-th use of a name on one rank meets the n-th use on the others."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeVar

from ferrorpc.errors import BarrierTimeoutError, FerroError

Result = TypeVar("Result")

NAMES_MAX: Final = 8_192
"""Names kept for each set of participants. A coordinator knows at most 5,120 of their barriers, open and past: of a name that
is forgotten here it knows none any more, so that it may be numbered from 1 again."""


class Ordinals:
    """The numbers of one generation.

    Of each set of participants, the names that were used last are kept. All its ranks forget the same ones, since they use them
    in the same order. A name belongs to the participants that used it last.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: dict[tuple[int, ...], dict[str, int]] = {}

    def use(self, name: str, ranks: tuple[int, ...], meet: Callable[[int], Result]) -> Result:
        """What `meet` returns, which is called with the number of this use of `name`. One that is interrupted has no end: the
        next use goes on with it, or this rank would meet the others' next one from then on."""
        with self._lock:
            before = self._last_of(name)
        try:
            return meet(self.next(name, ranks))
        except FerroError:
            raise
        except BaseException:
            with self._lock:
                if self._last_of(name) <= before + 1:  # no other thread has used it since
                    self._set(name, ranks, before)
            raise

    def next(self, name: str, ranks: tuple[int, ...]) -> int:
        """The number of this use of `name`, from 1, by these participants (world ranks in ascending order)."""
        with self._lock:
            ordinal = 1 + self._last_of(name)
            self._set(name, ranks, ordinal)
            return ordinal

    def _last_of(self, name: str) -> int:
        return max((numbers.get(name, 0) for numbers in self._last.values()), default=0)

    def _set(self, name: str, ranks: tuple[int, ...], ordinal: int) -> None:
        for numbers in self._last.values():
            numbers.pop(name, None)
        numbers = self._last.setdefault(ranks, {})
        numbers[name] = ordinal
        if len(numbers) > NAMES_MAX:
            del numbers[next(iter(numbers))]


def told_to(rank: int, error: BarrierTimeoutError) -> BarrierTimeoutError:
    """A barrier's timeout as it concerns a rank: one that is missing itself has come to a number that is over."""
    if rank not in error.missing:
        return error
    text = f"rank {rank} came when the others had given up: {error.message}"
    hint = (
        "the next use of this name is a new barrier on every rank: go on with it, or raise the timeout of those who came first"
    )
    return BarrierTimeoutError(error.missing, text, hint=hint)
