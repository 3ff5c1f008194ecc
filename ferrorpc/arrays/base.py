"""What the rest of the library knows of arrays: a view of what came in, a place for what goes out, a kind to go back to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ferrorpc.arrays.staging import Staging
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, TensorSpec

_OVERLAP_WORK = 10_000
"""How long the exact overlap test may search; beyond, arrays that might overlap count as overlapping."""


class View(NamedTuple):
    """An array that came in.

    Attributes:
        kind: what results are converted back to.
        spec: its dtype and shape.
        data: its elements, C-contiguous, in the storage dtype (bfloat16 as uint16). Not to be written.
        borrowed: `data` is the caller's own memory, not a copy.
        origin: the caller's memory as it lies, possibly strided; None where the host cannot see it.
        device_origin: the caller's array as it lies, where `data` is on its device too (`Kind.view_near`); else None.
    """

    kind: Kind
    spec: TensorSpec
    data: np.ndarray[Any, Any]
    borrowed: bool
    origin: np.ndarray[Any, Any] | None
    device_origin: Any | None = None


class Out:
    """An array that results are to be written to.

    Attributes:
        given: the caller's object; after `commit` it is the result.
        spec: its dtype and shape.
        data: where to write, C-contiguous, in the storage dtype: the caller's memory, or a scratch.
    """

    __slots__ = ("_origin", "_store", "data", "given", "spec")

    def __init__(
        self,
        given: Any,
        spec: TensorSpec,
        origin: np.ndarray[Any, Any] | None,
        store: Callable[[np.ndarray[Any, Any]], None] | None = None,
    ) -> None:
        self.given = given
        self.spec = spec
        self._origin = origin
        self._store = store
        if origin is not None and origin.flags.c_contiguous:
            self.data = origin
        else:
            self.data = np.empty(spec.shape, spec.dtype.storage)

    def commit(self) -> Any:
        """Brings what was written to `data` into the caller's array, which is returned."""
        if self._store is not None:
            self._store(self.data)
        elif self._origin is not None and self._origin is not self.data:
            np.copyto(self._origin, self.data)
        return self.given

    def touches(self, view: View) -> bool:
        """Whether it has, or may have, memory in common with `view`."""
        return view.device_origin is None and bool(np.may_share_memory(self.data, view.data))

    def shares(self, view: View) -> bool:
        """Whether this is exactly the memory of `view`, so that the operation is in place.

        Raises:
            UsageError: it overlaps that memory in part.
        """
        mine, theirs = self._origin, view.origin
        if mine is None or theirs is None or not np.may_share_memory(mine, theirs):
            return False
        if mine.ctypes.data == theirs.ctypes.data and mine.strides == theirs.strides and mine.shape == theirs.shape:
            return True
        if mine.size and theirs.size and _overlap(mine, theirs):
            raise UsageError("out overlaps the input in part", hint="pass the input itself as out=, or an array of its own")
        return False


class Kind(ABC):
    """One library's arrays."""

    name: str
    on_device: ClassVar[bool] = False
    """Whether they are in a GPU's memory, so that whoever makes or writes one does it in a stream."""

    @abstractmethod
    def view(self, x: Any) -> View:
        """Reads an array of this kind.

        Raises:
            TensorMismatchError: its dtype cannot be sent; the message lists what can.
            UsageError: it is no plain array (it requires a gradient, is sparse or masked).
        """

    @abstractmethod
    def spec(self, x: Any) -> TensorSpec:
        """dtype and shape of an array of this kind, without looking at its elements. Raises as `view`."""

    @abstractmethod
    def out(self, x: Any, spec: TensorSpec) -> Out:
        """Accepts an array of this kind to write a result of `spec` to.

        Raises:
            TensorMismatchError: dtype or shape differ, or it cannot be written.
        """

    def view_near(self, x: Any) -> View:
        """As `view`, but arrays of a GPU stay there: `data` is one of their library's, and nothing waits for it."""
        return self.view(x)

    def out_near(self, x: Any, spec: TensorSpec) -> Out:
        """As `out`, but results for a GPU's array are written there: `data` is one of its library's."""
        return self.out(x, spec)

    @property
    def staging(self) -> Staging:
        """The way of a device's arrays to the host and back."""
        raise AssertionError(f"{self.name} arrays are on the host already")

    @property
    def near(self) -> Kind:
        """The kind as which arrays of this one are seen where they are: `view_near` and `out_near` give its arrays."""
        return self

    def home(self, data: Any, spec: TensorSpec) -> np.ndarray[Any, Any]:
        """A copy on the host of a device array, as `view_near` gives them, in storage dtype."""
        raise AssertionError(f"{self.name} arrays are on the host already, {spec} too")

    @abstractmethod
    def wrap(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
        """An array of this kind holding `data` (C-contiguous, storage dtype): writable, in memory of its own.

        `data` itself is used where it owns its memory; it belongs to the result from then on.
        """

    @abstractmethod
    def alias(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any | None:
        """An array of this kind that shares the memory of `data` (as for `wrap`); None where this kind's are elsewhere."""

    def pointer_of(self, x: Any) -> int:
        """Tells whether an alias is still where it was made: some libraries let an array be given other memory."""
        return 0

    def address(self, x: Any) -> int:
        """Where the elements of x lie, one after the other, in the memory of this kind's GPU; 0 where it is not so plain. x is
        of this kind, but for the GPU, and its dtype can be sent."""
        return 0

    def takes_any_order(self, x: Any) -> bool:
        """Whether x's library works alike on x and on arrays beside it (as its gradient) that lie in another order."""
        return True

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        """A new array of this kind, its contents undefined."""

    def empty_beside(self, x: Any, spec: TensorSpec) -> Any:
        """A new array of this spec, its contents undefined, that lies in the order its library wants beside x, of its shape."""
        return self.empty(spec.shape, spec.dtype)


def fit(found: TensorSpec, wanted: TensorSpec) -> None:
    """Raises TensorMismatchError unless an `out` of spec `found` takes a result of spec `wanted`."""
    if found != wanted:
        raise TensorMismatchError(f"out is {found}, but the result is {wanted}")


def writable(origin: np.ndarray[Any, Any]) -> None:
    """Raises TensorMismatchError unless every element of `origin` can be written on its own."""
    if not origin.flags.writeable:
        raise TensorMismatchError("out is read-only", hint="pass a writable array, such as out.copy()")
    if origin.size and any(stride == 0 and count > 1 for stride, count in zip(origin.strides, origin.shape, strict=True)):
        raise TensorMismatchError("out has elements that share memory (it was broadcast or expanded)", hint="pass a copy of it")


def contiguous(origin: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself where it is C-contiguous, else a copy that is. Keeps zero dimensions, unlike NumPy's own function."""
    return origin if origin.flags.c_contiguous else origin.copy(order="C")


def owned(data: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
    """`data` in the shape of `spec`: itself where it is writable and owns its memory, else a copy."""
    if data.base is None and data.flags.writeable and data.shape == spec.shape:
        return data
    return data.reshape(spec.shape).copy()


def _overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        # The stub knows only the two named amounts of work.
        return bool(np.shares_memory(one, other, max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
