"""What an operation returns: the arrays of `out`, or new ones of the kind that was passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View, check_apart
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.kinds import copy_into, kind_of, spec_of, split, to_kind, view_out
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import TensorMismatchError
from ferrorpc.operations.landings import Landing
from ferrorpc.types import TensorSpec

Array = np.ndarray[Any, Any]


class Result(ABC):
    """The destination of one call's results.

    Attributes:
        targets: C-contiguous storage arrays that the operation writes to; None to let it allocate.
        on_device: whether the caller's result is on a GPU. `give` then runs on the caller's thread, for its stream.
        landing_device: the GPU on which it is brought to the caller's arrays as soon as the operation has ended, also if nobody
            waits. None for arrays on the host, and for new ones, which nobody knows before.
    """

    __slots__ = ("landing_device", "on_device", "targets")

    targets: list[Array] | None
    on_device: bool
    landing_device: Device | None
    is_written_by_operation: ClassVar[bool] = False
    """Whether it is complete on its GPU when the operation is."""

    @abstractmethod
    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The caller's result, from the arrays of a complete operation. `label`: its text names the operation in errors.

        Raises:
            TensorMismatchError: the result does not fit `out`.
        """

    def of(self, execution: Execution) -> Any:
        """The caller's result, from a complete execution."""
        execution.make_stream_wait()
        return self.give(execution.results, execution.specs, execution)

    def landing(self, given: Any) -> Landing | None:
        """Where the result that `of` has just given is complete; None on the host, and where the operation itself knows."""
        return Landing(given) if self.on_device else None


class Nothing(Result):
    """No result: a barrier, a send, a rank that is not the root."""

    __slots__ = ()

    def __init__(self) -> None:
        self.targets, self.on_device, self.landing_device = None, False, None

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> None:
        """None."""


NOTHING = Nothing()


class DeviceResult(Result):
    """An array on a GPU that the operation itself writes."""

    __slots__ = ("_out",)
    is_written_by_operation = True

    def __init__(self, out: Any) -> None:
        self.targets, self.on_device, self.landing_device = None, True, None
        self._out = out

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """That array."""
        return self._out

    def landing(self, given: Any) -> None:
        """None: it is complete behind the operation's own end event. Raises UsageError where the current stream is captured."""
        kind_of(given).staging.device.current()


class New(Result):
    """A new array, of the kind that went in."""

    __slots__ = ("_kind",)

    def __init__(self, kind: Kind) -> None:
        self.targets, self.on_device, self.landing_device = None, kind.on_device, None
        self._kind = kind

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The array."""
        return to_kind(self._kind, arrays[0], specs[0])


class NewList(Result):
    """A list of new arrays in rank order."""

    __slots__ = ("_kind",)

    def __init__(self, kind: Kind) -> None:
        self.targets, self.on_device, self.landing_device = None, kind.on_device, None
        self._kind = kind

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> list[Any]:
        """The arrays."""
        return [to_kind(self._kind, array, spec) for array, spec in zip(arrays, specs, strict=True)]


class Into(Result):
    """One result, into the caller's array.

    Args:
        out: the array.
        spec: of the result; None where only the message describes it.
        device_arrays: whether the operation writes GPU arrays itself.
    """

    __slots__ = ("_follow_call", "out")

    def __init__(self, out: Any, spec: TensorSpec | None, device_arrays: bool = False) -> None:
        self.out = _written_out(out, spec_of(out) if spec is None else spec, device_arrays)
        self.targets, self.landing_device = [self.out.data], device_among([out])
        self.on_device = self.landing_device is not None
        self._follow_call = Landing(out).follow if self.on_device else _nothing

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The caller's array."""
        self._follow_call()
        _land(arrays[0], specs[0], self.out.data, self.out.spec, label)
        return self.out.commit()

    def is_in_place(self, source: View) -> bool:
        """Whether it is the very memory of `source`. Raises UsageError when it overlaps it in part."""
        return self.out.is_in_place(source)


class IntoList(Result):
    """A list of results, each into one of the caller's arrays. `out`: a list of arrays in rank order."""

    __slots__ = ("_follow_call", "_given", "_outs")

    def __init__(self, out: Sequence[Any], size: int, device_arrays: bool = False) -> None:
        if len(out) != size:
            raise TensorMismatchError(f"out has {len(out)} arrays for {size} ranks", hint="pass one array for each rank")
        if len(set(map(id, out))) != size:
            raise TensorMismatchError("out has one array several times", hint="pass a list of arrays, not [array] * group.size")
        self._given = out
        self._outs: list[Out] = [_written_out(part, spec_of(part), device_arrays) for part in out]
        check_apart(self._outs)
        self.targets = [part.data for part in self._outs]
        self.landing_device = device_among(out)
        self.on_device = self.landing_device is not None
        self._follow_call = Landing(out).follow if self.on_device else _nothing

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The caller's list."""
        for spec, out in zip(specs, self._outs, strict=True):
            _check(spec, out.spec, label)
        self._follow_call()
        for array, out in zip(arrays, self._outs, strict=True):
            _land(array, out.spec, out.data, out.spec, label)
            out.commit()
        return self._given

    def is_in_place(self, source: View) -> bool:
        """Whether one of them is the very memory of `source`. Raises UsageError when one overlaps it in part."""
        shared = [out.is_in_place(source) for out in self._outs]
        return any(shared)


class IntoWhole(Result):
    """A list of results, into one array of the caller's that is split along axis 0 as by np.array_split."""

    __slots__ = ("_follow_call", "_out", "_specs")

    def __init__(self, out: Any, size: int, device_arrays: bool = False) -> None:
        spec = spec_of(out)
        if not spec.shape:
            raise TensorMismatchError("out is a single number, which cannot be split among ranks", hint="pass a list of arrays")
        self._out = _written_out(out, spec, device_arrays)
        self.targets, self.landing_device = split(self._out.data, size), device_among([out])
        self.on_device = self.landing_device is not None
        self._specs = [TensorSpec(spec.dtype, part.shape) for part in self.targets]
        self._follow_call = Landing(out).follow if self.on_device else _nothing

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The caller's array."""
        for found, wanted in zip(specs, self._specs, strict=True):
            _check(found, wanted, label)
        self._follow_call()
        for array, spec, target in zip(arrays, self._specs, self.targets or (), strict=True):
            _land(array, spec, target, spec, label)
        return self._out.commit()

    def is_in_place(self, source: View) -> bool:
        """Whether it is, or holds, memory of `source`."""
        return self._out.may_overlap(source)


def _written_out(out: Any, spec: TensorSpec, device_arrays: bool) -> Out:
    """As `view_out`, of an array whose library learns that it is written."""
    found = view_out(out, spec, device_arrays)
    kind_of(out).will_write(out)
    return found


def device_among(arrays: Iterable[Any]) -> Device | None:
    """The GPU of the first array that is on one; None if all are on the host."""
    kinds = (kind for kind in map(kind_of, arrays) if kind.on_device)
    return next((kind.staging.device for kind in kinds), None)


def _nothing() -> None:
    """As `Landing.follow`, for arrays on the host."""


def _check(found: TensorSpec, wanted: TensorSpec, label: object) -> None:
    if found == wanted:
        return
    hint = "pass one that fits, or leave out= away"
    if wanted == (found.dtype, (1, *found.shape)):
        hint = "an array is split along axis 0 like the input; for a row of each rank pass out=list(rows)"
    raise TensorMismatchError(f"{label} gave {found}, but out is {wanted}", hint=hint)


def _land(array: Array, spec: TensorSpec, target: Array, wanted: TensorSpec, label: object) -> None:
    _check(spec, wanted, label)
    if array is not target:
        copy_into(target, array)
