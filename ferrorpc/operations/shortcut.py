"""The shortest way for what is called most: blocking all_reduce of NumPy arrays, and barriers, where ranks share memory.

There an operation takes a few microseconds, which is what checking arguments in general and building an execution would
cost again. So this remembers, for each dtype, shape and operator, the prepared call, checks only what can differ between two
calls, and builds what a wait needs only once it lasts. What it does not know it leaves to the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.execution import ArenaExecution
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.types import ReduceOp, TensorSpec, dtype_of
from ferrorpc.wire.frames import Key

Array = np.ndarray[Any, Any]

REMEMBERED: Final = 256
"""Calls that are remembered; a program that makes more different ones takes the general way with the others."""


class Shortcut:
    """For one group.

    Args:
        dispatch: the general way.
        arena: the group's.
    """

    def __init__(self, dispatch: Dispatch, arena: Arena) -> None:
        self._dispatch = dispatch
        self._arena = arena
        self._bank = arena.bank(0)
        self._briefly: Callable[..., bool] = arena.polling.briefly
        self._latch = dispatch.backend.latch
        session = dispatch.backend.session
        self._activity = None if session is None else session.activity
        self._observed = dispatch.telemetry is not None  # the general way tells of every operation
        self._known: dict[tuple[Any, ...], ArenaPrepared | None] = {}
        self._barrier = None if self._observed else self._prepared(Call(Operation.BARRIER))

    def all_reduce(self, x: Any, op: Any, out: Any) -> Any:
        """The result, or None where it has to be gone about in the general way."""
        if type(x) is not np.ndarray:
            return None
        key = (x.dtype, x.shape, op)
        try:
            prepared = self._known[key]
        except KeyError:
            prepared = self._learn(key)
        except TypeError:  # an operator that cannot be hashed is none
            return None
        if prepared is None:
            return None
        flags = x.flags
        if out is x:
            if not flags.carray:
                return None
        elif not flags.c_contiguous:
            return None
        elif out is None:
            out = np.empty(x.shape, x.dtype)
        elif not _fits(out, x):
            return None
        self._run(prepared, (x,), (out,))
        return out

    def barrier(self) -> bool:
        """A barrier with the group's timeout; False where it has to be gone about in the general way."""
        if self._barrier is None:
            return False
        self._run(self._barrier, (), None)
        return True

    def _run(self, prepared: ArenaPrepared, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> None:
        dispatch = self._dispatch
        if dispatch.refuses or self._latch.cause is not None:
            dispatch.check_open()
        number = dispatch.next_number()
        if self._activity is not None:
            self._activity.note(prepared.signature)
        channel, before, base = prepared.turn(self._bank, number)
        steps = prepared.steps(channel, before, base, inputs, outputs)
        try:
            if self._briefly(steps):
                return
        except BaseException as error:  # noqa: BLE001  the general way reports it and raises the first cause
            steps = _failed(error)
        key = Key(dispatch.backend.group_id, 0, number)
        dispatch.run(ArenaExecution(self._arena, prepared.call, key, channel, steps, dispatch.guard(dispatch.timeout)))

    def _learn(self, key: tuple[Any, ...]) -> ArenaPrepared | None:
        dtype, shape, op = key
        if self._observed or len(self._known) >= REMEMBERED or dtype.isbuiltin != 1 or not isinstance(op, str | ReduceOp):
            return None
        if self._dispatch.refuses or self._latch.cause is not None:
            self._dispatch.check_open()
        spec = TensorSpec(dtype_of(dtype), shape)
        found = self._known[key] = self._prepared(Call(Operation.ALL_REDUCE, (spec,), ReduceOp.named(op)))
        return found

    def _prepared(self, call: Call) -> ArenaPrepared | None:
        found = self._dispatch.prepared((call.operation, call.inputs, call.op, None, None, None), lambda: call)
        return found if isinstance(found, ArenaPrepared) else None


def _fits(out: Any, x: Array) -> bool:
    """Whether the result of x can be written to `out`, another array, as it is."""
    if type(out) is not np.ndarray or out.dtype != x.dtype or out.shape != x.shape:
        return False
    flags = out.flags
    return bool(flags.carray) and ((flags.owndata and x.flags.owndata) or not np.may_share_memory(out, x))


def _failed(error: BaseException) -> Generator[int, None, Any]:
    raise error
    yield 0
