"""The shortest way for what is called most on a GPU: all_reduce of a plain array, where the backend takes addresses.

The GPU needs a few microseconds for a small one, and its host should not take longer than that to ask for it. So this
remembers for each dtype, shape and operator what the general way has found out, and checks only what can differ between two
calls. What it does not know it leaves to the general way.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from ferrorpc.arrays.base import Kind
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Bare
from ferrorpc.guard import seconds_of
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.results import Given
from ferrorpc.operations.shortcut import GENERAL, REMEMBERED, UNKNOWN
from ferrorpc.types import DType, ReduceOp
from ferrorpc.wire.frames import Key

NOT_PLAIN: Final = (AttributeError, TypeError, RuntimeError)
"""What reading `dtype` and `shape`, or hashing them, raises where the argument is no plain array."""


class Known(NamedTuple):
    """What was found out about calls with arrays like this.

    Attributes:
        kind: theirs.
        dtype: of their elements.
        size_bytes: of each.
        bare: the prepared call.
    """

    kind: Kind
    dtype: DType
    size_bytes: int
    bare: Bare


class DeviceShortcut:
    """For one group.

    Args:
        dispatch: the general way.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._group_id = dispatch.backend.group_id
        self._is_alone = dispatch.backend.size == 1
        self._known: dict[tuple[Any, ...], Known | None] = {}

    def all_reduce(self, x: Any, op: Any, out: Any, async_op: bool, timeout: float | None) -> Any:
        """As `Collectives.all_reduce`, or GENERAL."""
        try:
            key = type(x), x.dtype, x.shape, op
            known = self._known.get(key, UNKNOWN)
        except NOT_PLAIN:
            return GENERAL
        if known is UNKNOWN:
            known = self._learn(key, x, op)
        if known is None or (self._is_alone and not async_op):
            return GENERAL
        kind, dtype, size_bytes, bare = known
        source = target = kind.address(x)
        if not source:
            return GENERAL
        if out is None:
            out = kind.empty(x.shape, dtype)
            target = kind.address(out)
        elif out is not x:
            if type(out) is not key[0] or out.dtype != key[1] or out.shape != key[2]:
                return GENERAL
            target = kind.address(out)
            if not target or 0 < abs(target - source) < size_bytes:
                return GENERAL
        dispatch = self._dispatch
        dispatch.check_open()
        guard = dispatch.guard(seconds_of(timeout, dispatch.timeout))
        place = Key(self._group_id, 0, dispatch.next_number())
        execution = bare.start_at(place, source, target, (x, out), guard)
        if not async_op and dispatch.ran(bare, execution):
            return out
        return dispatch.finish(execution, Given(out), async_op)

    def _learn(self, key: tuple[Any, ...], x: Any, op: Any) -> Known | None:
        """Prepares such a call the general way, and remembers it; None where the short way does not fit it."""
        kind = kind_of(x)
        if not kind.on_device or not kind.address(x) or not isinstance(op, str | ReduceOp) or len(self._known) >= REMEMBERED:
            return None
        spec, chosen = kind.spec(x), ReduceOp.named(op)
        if type(kind.empty((0,), spec.dtype)) is not key[0]:  # who has a class of his own may mean something by it
            return None
        self._dispatch.check_open()
        prepared = self._dispatch.prepared(
            (Operation.ALL_REDUCE, (spec,), chosen, None, None, None), lambda: Call(Operation.ALL_REDUCE, (spec,), chosen)
        )
        bare = prepared.bare(kind.staging.device) if spec.elements else None
        found = None if bare is None else Known(kind, spec.dtype, spec.nbytes, bare)
        self._known[key] = found
        return found
