"""The base class of communication hooks, which sum the gradients of one bucket over all ranks."""

from __future__ import annotations

import copy
import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.ddp.hooks.residues import Residues
from ferrorpc.errors import UsageError
from ferrorpc.operations.stream import Stream
from ferrorpc.work import Work

T = TypeVar("T")
Exchange: TypeAlias = Generator[Work[Any], Any, Any]
"""Yields each collective it waits for and is sent its result; returns the delivered part of this rank's values."""


@dataclass(frozen=True, slots=True)
class Part:
    """The values that a hook sums.

    Attributes:
        key: the same in every step and on every rank, to file a hook's state under. Values of other parameters have another
            one. A hook that has values summed by another hook gives them keys that begin with this one.
        values: float32 of shape (n,), on the host, or for a hook with `on_device` a CuPy array; becomes the sum, in place:
            `part.values[...] = total`.
        matrices: (start, rows, columns) of each run of values that is a matrix in C order.
        wants_delivered: whether the exchange returns how much of this rank's original `values` was delivered: float32 of shape
            (n,), on the device of `values`. Otherwise it returns None.
        weight: of this rank in the mean: `values` are its gradients times the weight.
        unused: [start, stop) of each run of values whose parameter this rank has not used, in order. They are zero; or, in a
            torch module, a gradient from before that is still in `.grad`, which counts if another rank uses the parameter.
        residues: where the hook keeps what it leaves out of the mean itself, for its next step; None if nobody wants that.
        total_weight: waits for the sum of all ranks' weights; None if that is not known.
    """

    key: str
    values: Any
    matrices: tuple[tuple[int, int, int], ...] = ()
    wants_delivered: bool = False
    weight: float = 1.0
    unused: tuple[tuple[int, int], ...] = ()
    residues: Residues | None = None
    total_weight: Callable[[], Generator[Work[Any], Any, float]] | None = None


class Hook(ABC):
    """Reduces buckets by messages of its own. One object serves one synchroniser or module.

    Attributes:
        operations: how many collectives one bucket takes at most.
        on_device: whether it accepts values on a GPU, so that the buckets of a GPU's gradients may be there. Then `exchange`
            runs in one stream of that GPU for all buckets and steps.
        remembers: whether it keeps state from one step to the next, so that two models cannot share it.
    """

    operations: int = 1
    on_device: bool = False
    remembers: bool = True
    _serves: weakref.ref[Stream] | None = None
    _keys: tuple[str, ...] | None = None
    """The keys of the buckets that it serves."""

    def serve(self, stream: Stream, keys: Iterable[str]) -> None:
        """Binds the hook to the buckets of this stream. What it remembers of other buckets it forgets.

        Args:
            keys: of the parts that it will sum.

        Raises:
            UsageError: it has state of another stream, which is still open.
        """
        if not self.remembers:
            return
        if self._still_serves():
            gc.collect()  # a wrapper that was dropped is often part of a reference cycle
        if self._still_serves():
            raise UsageError(
                f"{self!r} belongs to another synchroniser or module of a group that is open, and remembers its gradients",
                hint="make one hook for each model; to wrap a model again, let go of the wrapper before",
            )
        self._serves, self._keys = weakref.ref(stream), tuple(keys)

    def __copy__(self) -> Self:
        """As a deep copy: two models cannot share what a hook remembers."""
        return copy.deepcopy(self)

    def __getstate__(self) -> Any:
        """What a copy takes over. It serves nobody yet."""
        state = super().__getstate__()
        own, *slots = state if isinstance(state, tuple) else (state,)
        own = {name: value for name, value in (own or {}).items() if name not in ("_serves", "_keys")}
        return (own, *slots) if slots else own

    def _still_serves(self) -> bool:
        served = None if self._serves is None else self._serves()
        return served is not None and served.is_open

    def _current(self, memory: Mapping[str, T]) -> dict[str, T]:
        """The part of some memory, by key, that belongs to the buckets it serves; all before it serves any."""
        return {key: each for key, each in memory.items() if self._keys is None or key.startswith(self._keys)}

    @property
    @abstractmethod
    def text(self) -> str:
        """A description that must be the same on all ranks."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.text}>"

    @abstractmethod
    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        """Replaces `part.values` by their sum over all ranks, with the same bits on each. A generator: see `Exchange`.

        Where a step fails it goes no further, and what it has in a `finally` runs at some later time, or never.
        """

    def state(self) -> dict[str, Array]:
        """A copy of this rank's state, to be saved with the weights."""
        return {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Loads what `state` returned on the same rank of a group of the same size. What belongs to buckets of other parameters
        is dropped, now or when the hook is given to a synchroniser or module.

        Raises:
            UsageError: it is another hook's.
        """
        check_state(state)
        if state:
            raise UsageError(f"{self.text} remembers nothing, but was given {', '.join(state)}", hint="is it the same hook?")


def check_state(state: Any) -> None:
    """Raises UsageError for what no hook's `state` has returned."""
    if not isinstance(state, Mapping):
        raise UsageError(f"{type(state).__name__} is no state of a hook", hint="pass what its state() gave")


class PlainAllReduce(Hook):
    """A plain all_reduce of float32."""

    on_device = True
    remembers = False

    @property
    def text(self) -> str:
        return "plain"

    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        delivered = part.values.copy() if part.wants_delivered else None
        yield collectives.all_reduce(part.values)
        return delivered


def run_exchange(hook: Hook, part: Part, collectives: BucketCollectives) -> Exchange:
    """The exchange of a hook, to be driven by `yield from`.

    Raises:
        UsageError: it is no generator, or does not return what was delivered where that is wanted.
    """
    steps: Any = hook.exchange(part, collectives)
    if not hasattr(steps, "send"):  # a tenth of the time that isinstance takes with an abstract class
        raise UsageError(
            f"the exchange of {hook!r} is no generator: it returned {_described(steps)}",
            hint="yield each collective that it starts, as in `yield collectives.all_reduce(part.values)`",
        )
    delivered = yield from steps
    if part.wants_delivered and getattr(delivered, "shape", None) != part.values.shape:
        raise UsageError(
            f"the exchange of {hook!r} returned {_described(delivered)} as what was delivered of {part.values.size} values",
            hint="where part.wants_delivered, return how much of each of this rank's values was delivered: "
            "a copy of part.values from before the sum, if all was",
        )
    return delivered


def _described(returned: Any) -> str:
    name, shape = type(returned).__name__, getattr(returned, "shape", None)
    return "None" if returned is None else f"{name} of shape {shape}" if shape is not None else name


def check_hook(given: Any) -> Hook:
    """Returns the hook. Raises UsageError if it is none."""
    if not isinstance(given, Hook):
        raise UsageError(f"hook={given!r} is no hook", hint="pass one of ferrorpc.hooks, such as hooks.Compress('bf16')")
    return given
