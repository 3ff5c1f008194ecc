"""The fast path for the most frequent call on a GPU: all_reduce of a plain array, where the backend takes addresses.

A small all_reduce takes the GPU a few microseconds, and the host should not need longer to launch it. So for each dtype, shape
and operator this caches what the general path has found out, and checks only what can differ between two calls. Everything else
is left to the general path.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from ferrorpc.arrays.base import Kind
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.execution import PointerAllReduce
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.fast_path import GENERAL_PATH, UNKNOWN, remember
from ferrorpc.operations.results import DeviceResult
from ferrorpc.types import DType, ReduceOp

NOT_PLAIN: Final = (AttributeError, TypeError, RuntimeError)
"""Raised by reading or hashing `dtype` and `shape` if the argument is no plain array."""


class Known(NamedTuple):
    """What is known of calls with arrays of one type, dtype and shape.

    Attributes:
        kind: of the arrays.
        device: their GPU.
        dtype: of the elements.
        size_bytes: of each.
        prepared: the call.
    """

    kind: Kind
    device: Device
    dtype: DType
    size_bytes: int
    prepared: PointerAllReduce


class DeviceFastPath:
    """The fast path of one group.

    Args:
        dispatch: the general path.

    Attributes:
        is_alone: the group has one rank, whose blocking calls take the general path: they copy.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self.is_alone = dispatch.backend.size == 1
        self._known: dict[tuple[Any, ...], Known | None] = {}

    def all_reduce(self, x: Any, op: Any, out: Any, async_op: bool, timeout: float | None) -> Any:
        """As `Collectives.all_reduce`, or GENERAL_PATH."""
        try:
            key = type(x), x.dtype, x.shape, op
            known = self._known.get(key, UNKNOWN)
        except NOT_PLAIN:
            return GENERAL_PATH
        if known is UNKNOWN:
            known = self._learn(key, x, op)
        if known is None or (self.is_alone and not async_op):
            return GENERAL_PATH
        kind, device, dtype, size_bytes, prepared = known
        source = target = kind.address(x)
        if not source:
            return GENERAL_PATH
        if out is None:
            device.current()  # raises during a capture, which an allocation would make invalid
            out = kind.empty(x.shape, dtype)
            target = kind.address(out)
        else:
            if out is not x:
                if type(out) is not key[0] or out.dtype != key[1] or out.shape != key[2]:
                    return GENERAL_PATH
                target = kind.address(out)
                if not target or 0 < abs(target - source) < size_bytes:
                    return GENERAL_PATH
            kind.will_write(out)
        return self._launch(prepared, source, target, (x, out), async_op, timeout)

    def _launch(
        self,
        prepared: PointerAllReduce,
        source: int,
        target: int,
        arrays: tuple[Any, Any],
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        dispatch, (_, out), execution = self._dispatch, arrays, None
        try:
            execution = dispatch.start_at(prepared, source, target, arrays, timeout)
            if not async_op and dispatch.telemetry is None and execution.ran():  # the host has not waited: nothing to be timed
                dispatch.note(prepared.signature)
                return out
            return dispatch.finish(execution, DeviceResult(out), async_op)
        except BaseException as error:
            dispatch.struck(Operation.ALL_REDUCE.value, error)
            if execution is not None:  # perhaps it has no driver yet, which alone would check its deadline
                execution.finish()
            raise

    def _learn(self, key: tuple[Any, ...], x: Any, op: Any) -> Known | None:
        """Prepares a call by the general path and caches it; None where the fast path does not support it."""
        kind = kind_of(x)
        if not kind.on_device or not kind.address(x) or not isinstance(op, str | ReduceOp):
            return None
        device: Device = kind.staging.device
        device.current()
        spec, chosen = kind.spec(x), ReduceOp.named(op)
        if type(kind.empty((0,), spec.dtype)) is not key[0]:  # a subclass may define its own behaviour
            return None
        self._dispatch.check_open()
        prepared = self._dispatch.prepared(Operation.ALL_REDUCE, (spec,), chosen)
        on_pointers = prepared.for_pointers(device) if spec.elements else None
        found = None if on_pointers is None else Known(kind, device, spec.dtype, spec.nbytes, on_pointers)
        remember(self._known, key, found)
        return found
