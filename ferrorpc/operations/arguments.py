"""Checks the arguments of a group's operations before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.kinds import copy_of, kind_of, spec_of, split, view
from ferrorpc.collectives.ranks_and_tags import rank_of
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.operations.results import NOTHING, Into, New, Result, into_list, into_one, into_whole
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import DIMENSION_MAX, NDIM_MAX


def ranks_of(ranks: Iterable[Any], size: int) -> list[int]:
    """The ranks of a subgroup, each once. Raises InvalidRankError or UsageError."""
    try:
        given = list(ranks)
    except TypeError:  # an array without dimensions, too
        raise UsageError(f"ranks={ranks!r} is no list of ranks", hint="give one, such as [0, 2]") from None
    chosen = [rank_of(rank, size, "a subgroup's rank") for rank in given]
    if not chosen or len(set(chosen)) != len(chosen):
        hint = "give at least one rank, and none twice"
        raise UsageError(f"ranks={chosen!r} must name each member of the subgroup once", hint=hint)
    return chosen


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape, given as an integer or a sequence of them. Raises UsageError."""
    try:
        several = isinstance(shape, Iterable) and not isinstance(shape, bytes)
        sizes = tuple(index(size) for size in shape) if several else (index(shape),)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise UsageError(f"shape={shape!r} is no shape", hint="pass an integer or a tuple of integers, 0 or more")
    return sizes


def check_sendable(specs: Iterable[TensorSpec]) -> None:
    """Refuses arrays that no frame can describe. Raises UsageError."""
    for spec in specs:
        if len(spec.shape) > NDIM_MAX or max(spec.shape, default=0) >= DIMENSION_MAX:
            raise UsageError(
                f"an array of {len(spec.shape)} dimensions, the longest {max(spec.shape)}, cannot be sent",
                hint=f"reshape it: at most {NDIM_MAX} dimensions, each below 2^40",
            )


def kind_like(like: Any, out: Any) -> Kind:
    """The kind of a result on a rank that has no input: that of the array passed in its place, if there is one.

    Raises:
        UsageError: that array is of an unsupported kind.
    """
    if like is None:
        return kind_of(out)
    spec_of(like)
    return kind_of(like)


class Arguments:
    """Reads the arguments of one group's operations.

    Args:
        device_arrays: whether the backend takes GPU arrays where they are. Without it they are copied to the host.
    """

    __slots__ = ("_device_arrays",)

    def __init__(self, device_arrays: bool) -> None:
        self._device_arrays = device_arrays

    def view(self, x: Any) -> View:
        """Reads an array or a number. Raises as `arrays.kinds.view`."""
        return view(x, self._device_arrays)

    def parts(self, parts: Any, size: int) -> list[View]:
        """One array for each rank: a list as it is, an array split along axis 0 as by np.array_split.

        Raises:
            TensorMismatchError: another number of parts, or parts of different dtypes.
        """
        is_list = isinstance(parts, list | tuple)
        views = (
            [view(part, self._device_arrays) for part in parts] if is_list else _split(view(parts, self._device_arrays), size)
        )
        if len(views) != size:
            raise TensorMismatchError(f"{len(views)} parts were given for {size} ranks", hint="pass one part for each rank")
        dtypes = sorted({part.spec.dtype.label for part in views})
        if len(dtypes) > 1:
            raise TensorMismatchError(f"the parts have different dtypes: {', '.join(dtypes)}", hint="convert them to one")
        return views

    def one_result(self, out: Any, kind: Kind, spec: TensorSpec | None, sources: list[View]) -> Result:
        """The destination of a single result. `spec` is None where only the message describes it.

        Raises:
            TensorMismatchError: `out` has another dtype or shape, or is read-only.
            UsageError: `out` overlaps a source in part.
        """
        if out is None:
            return New(kind)
        into = into_one(out, spec, self._device_arrays)
        copy_overlaps(sources, into, in_place=len(sources) == 1)
        return into

    def list_result(self, out: Any, kind: Kind, size: int, sources: list[View]) -> Result:
        """The destination of a list of results: a list of arrays, or one split along axis 0. Raises as `one_result`."""
        if out is None:
            return New(kind, is_list=True)
        into = (into_list if isinstance(out, list | tuple) else into_whole)(out, size, self._device_arrays)
        copy_overlaps(sources, into, in_place=False)
        return into


def _split(whole: View, size: int) -> list[View]:
    if not whole.spec.shape:
        raise TensorMismatchError("a single number cannot be split among ranks", hint="pass a list of arrays")
    datas = split(whole.data, size)
    origins = [None] * size if whole.origin is None else split(whole.origin, size)
    return [
        View(whole.kind, TensorSpec(whole.spec.dtype, data.shape), data, whole.borrowed, origin)
        for data, origin in zip(datas, origins, strict=True)
    ]


def no_result(out: Any) -> Result:
    """The destination off the root. `out` may be given, so that all ranks can make the same call; it is not written."""
    if out is not None and not isinstance(out, list | tuple):
        spec_of(out)
    return NOTHING


def copy_overlaps(sources: list[View], into: Into, *, in_place: bool) -> None:
    """Replaces sources that share memory with results by copies, because a plan may write one before it reads the other.

    With one item on each side that cannot happen, and the operation works in place.
    """
    for item, source in enumerate(sources):
        if into.is_in_place(source) and not in_place:
            sources[item] = source._replace(data=copy_of(source.data), borrowed=False)
