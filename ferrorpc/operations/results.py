"""What an operation returns: the arrays of `out`, or new ones of the kind that was passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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

    __slots__ = ()

    targets: list[Array] | None = None
    on_device: bool = False
    landing_device: Device | None = None

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

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> None:
        """None."""


NOTHING = Nothing()


class DeviceResult(Result):
    """An array on a GPU that the operation itself writes."""

    __slots__ = ("_out",)
    on_device = True

    def __init__(self, out: Any) -> None:
        self._out = out

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """That array."""
        return self._out

    def landing(self, given: Any) -> None:
        """None: it is complete behind the operation's own end event. Raises UsageError where the current stream is captured."""
        kind_of(given).staging.device.current()


class New(Result):
    """New arrays of the kind that went in: one, or a list of them in rank order."""

    __slots__ = ("_is_list", "_kind", "on_device")

    def __init__(self, kind: Kind, is_list: bool = False) -> None:
        self._kind, self._is_list, self.on_device = kind, is_list, kind.on_device

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The array, or the list."""
        if self._is_list:
            return [to_kind(self._kind, array, spec) for array, spec in zip(arrays, specs, strict=True)]
        return to_kind(self._kind, arrays[0], specs[0])


class Into(Result):
    """Results, into the caller's arrays.

    Args:
        given: what the caller passed as `out`, and gets back.
        outs: its arrays, whose libraries learn that they are written.
        targets: a storage array for each result.
        specs: dtype and shape of each result.
        is_split: whether the targets are the parts of a single array.
    """

    __slots__ = ("_given", "_is_split", "_passed_in", "_specs", "landing_device", "on_device", "outs", "targets")

    def __init__(
        self, given: Any, outs: list[Out], targets: list[Array], specs: list[TensorSpec], is_split: bool = False
    ) -> None:
        self.outs, self.targets, self.landing_device = outs, targets, None
        for out in outs:
            kind = kind_of(out.given)
            kind.will_write(out.given)
            if kind.on_device and self.landing_device is None:
                self.landing_device = kind.staging.device
        self.on_device = self.landing_device is not None
        self._given, self._specs, self._is_split = given, specs, is_split
        self._passed_in = Landing(given) if self.on_device else None

    def give(self, arrays: Sequence[Array], specs: Sequence[TensorSpec], label: object) -> Any:
        """The caller's `out`."""
        if list(specs) != self._specs:
            raise _misfit(specs, self._specs, label, self._is_split)
        if self._passed_in is not None:
            self._passed_in.follow()
        for array, target in zip(arrays, self.targets or (), strict=True):
            if array is not target:
                copy_into(target, array)
        for out in self.outs:
            out.commit()
        return self._given

    def is_in_place(self, source: View) -> bool:
        """Whether a result is the very memory of `source`, or may be some of it where the targets are parts of one array.

        Raises:
            UsageError: an array that is not split overlaps it in part.
        """
        if self._is_split:
            return self.outs[0].may_overlap(source)
        shared = [out.is_in_place(source) for out in self.outs]
        return any(shared)


def into_one(out: Any, spec: TensorSpec | None, device_arrays: bool = False) -> Into:
    """One result, into an array.

    Args:
        spec: of the result; None where only the message describes it.
        device_arrays: whether the operation writes GPU arrays itself.
    """
    found = view_out(out, spec_of(out) if spec is None else spec, device_arrays)
    return Into(out, [found], [found.data], [found.spec])


def into_list(out: Sequence[Any], size: int, device_arrays: bool = False) -> Into:
    """A result of each rank, into a list of arrays in rank order. Raises TensorMismatchError or UsageError."""
    if len(out) != size:
        raise TensorMismatchError(f"out has {len(out)} arrays for {size} ranks", hint="pass one array for each rank")
    if len(set(map(id, out))) != size:
        raise TensorMismatchError("out has one array several times", hint="pass a list of arrays, not [array] * group.size")
    outs = [view_out(part, spec_of(part), device_arrays) for part in out]
    check_apart(outs)
    return Into(out, outs, [part.data for part in outs], [part.spec for part in outs])


def into_whole(out: Any, size: int, device_arrays: bool = False) -> Into:
    """A result of each rank, into one array that is split along axis 0 as by np.array_split. Raises TensorMismatchError."""
    spec = spec_of(out)
    if not spec.shape:
        raise TensorMismatchError("out is a single number, which cannot be split among ranks", hint="pass a list of arrays")
    whole = view_out(out, spec, device_arrays)
    targets = split(whole.data, size)
    return Into(out, [whole], targets, [TensorSpec(spec.dtype, part.shape) for part in targets], is_split=True)


def _misfit(specs: Sequence[TensorSpec], outs: Sequence[TensorSpec], label: object, is_split: bool) -> TensorMismatchError:
    found, out = next(pair for pair in zip(specs, outs, strict=True) if pair[0] != pair[1])
    what, hint = "the part of out for it" if is_split else "out", "pass one that fits, or leave out= away"
    if is_split and out.dtype == found.dtype and out.shape[1:] == found.shape:
        hint = "an array is split along axis 0 like the input; for a row of each rank pass out=list(rows)"
    return TensorMismatchError(f"{label} gave {found}, but {what} is {out}", hint=hint)
