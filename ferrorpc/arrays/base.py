"""The interface to arrays of any library: views of inputs, outputs to write to, and kinds that convert results back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ferrorpc.arrays.staging import Staging
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.guard import Guard
from ferrorpc.types import DType, TensorSpec

_OVERLAP_WORK = 10_000
"""The bound of NumPy's exact overlap test; beyond it, arrays that might overlap count as overlapping."""


class View(NamedTuple):
    """An input array.

    Attributes:
        kind: the kind that results are converted back to.
        spec: its dtype and shape.
        data: its elements, C-contiguous, in the storage dtype (bfloat16 as uint16). Read-only by convention.
        borrowed: whether `data` is the caller's own memory, not a copy.
        origin: the caller's array in its own layout, possibly strided; None if `data` is on another device than it.
    """

    kind: Kind
    spec: TensorSpec
    data: np.ndarray[Any, Any]
    borrowed: bool
    origin: Any | None

    @property
    def addresses(self) -> np.ndarray[Any, Any] | None:
        """As `Out.addresses`."""
        return None if self.origin is None else addresses_of(self.origin)


class Out:
    """An array that a result is written to.

    Attributes:
        given: the caller's object, which is the result after `commit`.
        spec: its dtype and shape.
        data: where to write, C-contiguous, in the storage dtype: the caller's memory, or scratch.

    Args:
        given: the caller's object.
        spec: its dtype and shape.
        origin: its elements as an array in storage dtype, on the host or a device; None if they can only be stored.
        store: copies results from `data` to it; None to copy to `origin`, on the host, unless `data` is `origin` itself.
        scratch: `data` where that is not `origin`; None for a new array on the host.
    """

    __slots__ = ("_origin", "_store", "data", "given", "spec")

    def __init__(
        self,
        given: Any,
        spec: TensorSpec,
        origin: Any,
        store: Callable[[Any], None] | None = None,
        scratch: Any = None,
    ) -> None:
        self.given = given
        self.spec = spec
        self._origin = origin
        self._store = store
        if store is None and origin.flags.c_contiguous:
            self.data = origin
        else:
            self.data = np.empty(spec.shape, spec.dtype.storage) if scratch is None else scratch

    def commit(self) -> Any:
        """Copies `data` to the caller's array unless it is that array's memory. Returns the caller's array."""
        if self._store is not None:
            self._store(self.data)
        elif self._origin is not self.data:
            np.copyto(self._origin, self.data)
        return self.given

    @property
    def addresses(self) -> np.ndarray[Any, Any] | None:
        """An array at the addresses of the caller's, which may be a GPU's: to compare, never to read. None if not known."""
        return None if self._origin is None else addresses_of(self._origin)

    def may_overlap(self, view: View) -> bool:
        """Whether it shares, or may share, memory with `view`."""
        return bool(np.may_share_memory(addresses_of(self.data), addresses_of(view.data)))

    def is_in_place(self, view: View) -> bool:
        """Whether this is exactly the memory of `view`: the operation is in place.

        Raises:
            UsageError: the two overlap in part.
        """
        if self.given is view.origin:
            return True  # the same object, as most often: addresses take longer to compare
        mine, theirs = self.addresses, view.addresses
        if mine is None or theirs is None or not np.may_share_memory(mine, theirs):
            return False
        if mine.ctypes.data == theirs.ctypes.data and mine.shape == theirs.shape and _steps(mine) == _steps(theirs):
            return True
        if _overlap(mine, theirs):
            raise UsageError("out overlaps the input in part", hint="pass the input itself as out=, or an array of its own")
        return False


def addresses_of(array: Any) -> np.ndarray[Any, Any]:
    """A host array itself; for a device array one at the same addresses, to compare and never to read."""
    if isinstance(array, np.ndarray):
        return array
    if not array.size:  # it may be nowhere, and NumPy 1.26 takes no array at the address 0
        return np.empty(array.shape, array.dtype)
    return np.asarray(_Addresses(array))


class _Addresses:
    """Where the elements of a device array are, as NumPy reads it. NumPy keeps this object as long as it uses the addresses."""

    def __init__(self, stored: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (stored.data.ptr, True),
            "shape": stored.shape,
            "strides": stored.strides,
            "typestr": stored.dtype.str,
        }


class Kind(ABC):
    """The arrays of one library, on the host or on one device."""

    on_device: ClassVar[bool] = False
    """Whether they are in a GPU's memory, where arrays are created and written in a stream."""

    @abstractmethod
    def view(self, x: Any) -> View:
        """A view of an array of this kind.

        Raises:
            TensorMismatchError: its dtype cannot be sent; the message lists what can.
            UsageError: it is not a plain array (requires a gradient, is sparse or masked).
        """

    @abstractmethod
    def spec(self, x: Any) -> TensorSpec:
        """The dtype and shape of an array of this kind, without reading its elements. Raises as `view`."""

    @abstractmethod
    def out(self, x: Any, spec: TensorSpec) -> Out:
        """Accepts an array of this kind to write a result of `spec` to.

        Raises:
            TensorMismatchError: dtype or shape differ, or it cannot be written.
        """

    def view_on_device(self, x: Any) -> View:
        """As `view`, but GPU arrays stay on the GPU: `data` is an array of `device_kind`. Nothing is synchronised."""
        return self.view(x)

    def out_on_device(self, x: Any, spec: TensorSpec) -> Out:
        """As `out`, but for a GPU array `data` is on the GPU: an array of `device_kind`."""
        return self.out(x, spec)

    @property
    def staging(self) -> Staging:
        """Copies of the device's arrays to the host and back."""
        raise AssertionError(f"{type(self).__name__}: its arrays are on the host already")

    @property
    def device_kind(self) -> Kind:
        """The kind of what `view_on_device` and `out_on_device` give: torch tensors on a GPU are seen as CuPy arrays."""
        return self

    def to_host(self, data: Any, spec: TensorSpec, guard: Guard | None = None) -> np.ndarray[Any, Any]:
        """A host copy, in storage dtype, of a device array from `view_on_device`. `guard` as for `Staging.to_host`."""
        raise AssertionError(f"{type(self).__name__}: its arrays are on the host already")

    @abstractmethod
    def wrap(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
        """A writable array of this kind with the elements of `data` (C-contiguous, storage dtype), in memory of its own.

        The memory of `data` is used if `data` owns it; it belongs to the result from then on.
        """

    @abstractmethod
    def alias(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any | None:
        """An array of this kind that shares the memory of `data` (as for `wrap`); None if this kind's are in other memory."""

    def pointer_of(self, x: Any) -> int:
        """The address of x's first element, to compare: some libraries can give an array other memory. 0 if it is not known."""
        return 0

    def address(self, x: Any) -> int:
        """The device address of x, an array of this kind's library with a dtype that can be sent; 0 unless it is contiguous and
        on this kind's GPU."""
        return 0

    def memory(self, x: Any) -> np.ndarray[Any, Any] | None:
        """A NumPy array on the memory of x, where x is a plain array of another library on the host; else None."""
        return None

    def will_write(self, x: Any) -> None:
        """Tells x's library that the elements of x will be other ones, so that it can refuse what relies on those of now."""
        return

    def takes_any_order(self, x: Any) -> bool:
        """Whether x's library accepts companions of x, such as its gradient, in another memory order."""
        return True

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        """A new array of this kind, its contents undefined."""

    def empty_beside(self, x: Any, spec: TensorSpec) -> Any:
        """A new array of this spec, its contents undefined, in the memory order that its library wants for a companion of x."""
        return self.empty(spec.shape, spec.dtype)


class GpuKind(Kind):
    """The arrays of one library on one GPU. Subclasses have `view_on_device` and `staging`."""

    on_device = True

    def view(self, x: Any, guard: Guard | None = None) -> View:
        """As `Kind.view`. `guard` as for `Staging.to_host`."""
        seen = self.view_on_device(x)  # refused before anything is copied
        return View(self, seen.spec, self.to_host(seen.data, seen.spec, guard), False, None)

    def to_host(self, data: Any, spec: TensorSpec, guard: Guard | None = None) -> np.ndarray[Any, Any]:
        return self.staging.to_host(data, guard).reshape(spec.shape)


def check_spec(found: TensorSpec, wanted: TensorSpec) -> None:
    """Raises TensorMismatchError unless an `out` of spec `found` takes a result of spec `wanted`."""
    if found != wanted:
        raise TensorMismatchError(f"out is {found}, but the result is {wanted}")


def check_writable(origin: np.ndarray[Any, Any]) -> None:
    """Raises TensorMismatchError unless every element of `origin` can be written on its own."""
    if not origin.flags.writeable:
        raise TensorMismatchError("out is read-only", hint="pass a writable array, such as out.copy()")
    if not origin.flags.c_contiguous:
        check_distinct(origin)


def check_distinct(array: Any) -> None:
    """Raises TensorMismatchError if elements of an array, on the host or a GPU, may share memory."""
    if not array.size:
        return
    extent_bytes = array.dtype.itemsize
    for stride, count in sorted((abs(stride), count) for stride, count in zip(array.strides, array.shape, strict=True)):
        if count > 1:
            if stride < extent_bytes:
                what = "it was broadcast, expanded or made by as_strided"
                raise TensorMismatchError(f"out has elements that share memory ({what})", hint="pass a copy of it")
            extent_bytes += stride * (count - 1)


def check_apart(outs: Sequence[Out]) -> None:
    """Raises UsageError if two arrays that results are written to share memory."""
    known = [(place, out.addresses) for place, out in enumerate(outs)]
    for (first, mine), (second, theirs) in combinations(known, 2):
        if mine is not None and theirs is not None and np.may_share_memory(mine, theirs) and _overlap(mine, theirs):
            raise UsageError(f"out[{first}] and out[{second}] overlap", hint="pass arrays that share no memory")


def contiguous(origin: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself if it is C-contiguous, else a C-contiguous copy. Keeps zero dimensions, unlike np.ascontiguousarray."""
    return origin if origin.flags.c_contiguous else origin.copy(order="C")


def owned_array(data: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
    """`data` in the shape of `spec`: `data` itself if it is writable and owns its memory, else a copy."""
    if data.base is None and data.flags.writeable and data.shape == spec.shape:
        return data
    return data.reshape(spec.shape).copy()


def _steps(array: np.ndarray[Any, Any]) -> list[int]:
    """The strides that are taken: along a dimension of one there is no step, whatever its stride."""
    return [stride for stride, count in zip(array.strides, array.shape, strict=True) if count > 1]


def _overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        # The stub knows only the two named amounts of work.
        return bool(np.shares_memory(one, other, max_work=_OVERLAP_WORK))  # type: ignore[arg-type, unused-ignore]
    except np.exceptions.TooHardError:
        return True
