"""What a communication hook is: how the gradients of one bucket become their sum over all ranks."""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ferrorpc.ddp.lane import Lane
from ferrorpc.ddp.memory import Array
from ferrorpc.errors import UsageError
from ferrorpc.operations.stream import Stream
from ferrorpc.work import Work

Exchange: TypeAlias = Generator[Work[Any], Any, Any]
"""Yields each operation it waits for and gets its result back; returns what of this rank's values was delivered."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a hook sums.

    Attributes:
        key: the same in every round and on every rank: what a hook remembers goes by it.
        values: float32 of shape (n,), on the host, or for a hook with `on_device` a CuPy array; becomes the sum.
        matrices: (start, rows, columns) of each run of values that is a matrix, row by row.
        wants_delivered: the exchange is to return what of `values`, as they were, this rank has delivered: float32 of shape
            (n,), where `values` are. Otherwise it returns None.
    """

    key: str
    values: Any
    matrices: tuple[tuple[int, int, int], ...] = ()
    wants_delivered: bool = False


class Hook(ABC):
    """Exchanges buckets by other messages than their own bytes. One object serves one synchroniser or module.

    Attributes:
        operations: how many operations one bucket takes at most.
        on_device: whether it takes values where they are, so that buckets of a GPU's gradients may lie there. Then `exchange`
            runs in one stream of that GPU's, for all buckets and rounds, as does all it makes.
        remembers: whether it keeps anything of one round for later ones, so that two models cannot share it.
    """

    operations: int = 1
    on_device: bool = False
    remembers: bool = True
    _serves: weakref.ref[Stream] | None = None

    def serve(self, stream: Stream) -> None:
        """It exchanges the buckets of this stream from now on.

        Raises:
            UsageError: it remembers what it left out of another stream's buckets, which still travel: it would add that here.
        """
        if not self.remembers:
            return
        if self._still_serves():
            gc.collect()  # a wrapper that was let go of is often part of a circle
        if self._still_serves():
            raise UsageError(
                f"{self!r} belongs to another synchroniser or module of a group that is open, and remembers its gradients",
                hint="make one hook for each model; to wrap a model again, let go of the wrapper before",
            )
        self._serves = weakref.ref(stream)

    def _still_serves(self) -> bool:
        served = None if self._serves is None else self._serves()
        return served is not None and served.is_open

    @property
    @abstractmethod
    def text(self) -> str:
        """What all ranks must agree on, in words."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.text}>"

    @abstractmethod
    def exchange(self, part: Part, lane: Lane) -> Exchange:
        """Replaces `part.values` by their sum over all ranks, which must have the same bits on each."""

    def state(self) -> dict[str, Array]:
        """What the hook remembers from round to round, this rank's: copies, to be saved with the weights."""
        return {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Goes on from what `state` gave, on the same rank of a group of the same size.

        Raises:
            UsageError: it is another hook's.
        """
        if state:
            raise UsageError(f"{self.text} remembers nothing, but was given {', '.join(state)}", hint="is it the same hook?")


class Plain(Hook):
    """The values' own bytes."""

    on_device = True
    remembers = False

    @property
    def text(self) -> str:
        return "plain"

    def exchange(self, part: Part, lane: Lane) -> Exchange:
        delivered = part.values.copy() if part.wants_delivered else None
        yield lane.all_reduce(part.values)
        return delivered


def check_hook(given: Any) -> Hook:
    """What was given as a hook. Raises UsageError where it is none."""
    if not isinstance(given, Hook):
        raise UsageError(f"hook={given!r} is no hook", hint="pass one of ferrorpc.hooks, such as hooks.Compress('bf16')")
    return given
