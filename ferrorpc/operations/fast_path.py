"""The fast path for the most frequent calls: blocking collectives of NumPy arrays, where ranks share memory.

There an operation takes a few microseconds, and general argument checks and an execution object would cost as much again. So
for each operation, dtype, shape, root and operator this caches the prepared call, checks only what can differ between two
calls, and builds an execution only when the operation has to wait. Everything else is left to the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.kinds import NUMPY, split, to_kind
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.execution import ArenaExecution, Outcome, Steps
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.call import Operation
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.results import Into, IntoWhole
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key

Array = np.ndarray[Any, Any]

GENERAL_PATH: Final = object()
"""Returned in place of a result: the operation has not begun, and must take the general path."""
UNKNOWN: Final[Any] = object()
"""In place of a prepared call or None: not in the cache."""
NATIVE: Final = {dtype.storage: dtype for dtype in DType if dtype is not DType.BFLOAT16}
"""The dtypes that NumPy itself has."""
REDUCING: Final = frozenset(("all_reduce", "reduce", "reduce_scatter"))
ROOTED: Final = frozenset(("broadcast", "reduce", "gather", "scatter"))
CACHED_CALLS: Final = 256
"""How many calls are cached. All others take the general path."""


class FastPath:
    """The fast path of one group. Its operations are those of `Collectives`, without the arguments it does not support.

    Args:
        dispatch: the general path.
        arena: the group's.
    """

    def __init__(self, dispatch: Dispatch, arena: Arena) -> None:
        self._dispatch = dispatch
        self._arena = arena
        self._rank, self._size = arena.rank, arena.size
        self._bank = arena.bank(0)
        self._spin: Callable[..., bool] = arena.polling.spin
        self._latch = dispatch.backend.latch
        session = dispatch.backend.session
        self._activity = None if session is None else session.activity
        self._observed = dispatch.telemetry is not None  # the general path reports every operation
        self._known: dict[tuple[Any, ...], ArenaPrepared | None] = {}
        self._barrier = None if self._observed else self._prepared(Operation.BARRIER)

    def barrier(self) -> bool:
        """A barrier with the group's timeout. Returns False if it must take the general path."""
        if self._barrier is None:
            return False
        self._run(self._barrier, (), None)
        return True

    def all_reduce(self, x: Any, op: Any, out: Any) -> Any:
        """The result, or GENERAL_PATH. As the most frequent call it has its steps inline."""
        if type(x) is not np.ndarray:
            return GENERAL_PATH
        key = x.dtype, x.shape, op
        try:
            prepared = self._known.get(key, UNKNOWN)
        except TypeError:  # an operator that cannot be hashed is invalid
            return GENERAL_PATH
        if prepared is UNKNOWN:
            prepared = self._learn(key, "all_reduce", (x,), None, op)
        if prepared is None:
            return GENERAL_PATH
        flags = x.flags
        if out is x:
            if not flags.carray:
                return GENERAL_PATH
        elif not flags.c_contiguous:
            return GENERAL_PATH
        elif out is None:
            out = np.empty(x.shape, x.dtype)
        elif not _takes(out, (x,), x):
            return GENERAL_PATH
        self._run(prepared, (x,), (out,))
        return out

    def reduce(self, x: Any, root: Any, op: Any, out: Any) -> Any:
        """The result, None off the root, or GENERAL_PATH."""
        prepared = self._of(x, "reduce", root, op)
        if prepared is None:
            return GENERAL_PATH
        return self._one(prepared, (x,), x, out) if root == self._rank else self._none(prepared, x, out)

    def gather(self, x: Any, root: Any, out: Any) -> Any:
        """The results, None off the root, or GENERAL_PATH."""
        prepared = self._of(x, "gather", root, None)
        if prepared is None:
            return GENERAL_PATH
        return self._all(prepared, (x,), out) if root == self._rank else self._none(prepared, x, out)

    def broadcast(self, x: Any, root: Any, out: Any) -> Any:
        """The result, or GENERAL_PATH."""
        if type(root) is int and root == self._rank:
            prepared = self._of(x, "broadcast", root, None)
            return GENERAL_PATH if prepared is None else self._one(prepared, (x,), x, out)
        return self._from_root("broadcast", root, out) if x is None or x is out else GENERAL_PATH

    def scatter(self, parts: Any, root: Any, out: Any) -> Any:
        """The result, or GENERAL_PATH."""
        if type(root) is int and root == self._rank:
            return self._of_parts(parts, "scatter", root, None, out)
        return self._from_root("scatter", root, out) if parts is None else GENERAL_PATH

    def all_gather(self, x: Any, out: Any) -> Any:
        """The results, or GENERAL_PATH."""
        prepared = self._of(x, "all_gather", None, None)
        return GENERAL_PATH if prepared is None else self._all(prepared, (x,), out)

    def reduce_scatter(self, parts: Any, op: Any, out: Any) -> Any:
        """The result, or GENERAL_PATH."""
        return self._of_parts(parts, "reduce_scatter", None, op, out)

    def all_to_all(self, parts: Any, out: Any) -> Any:
        """The results, or GENERAL_PATH."""
        inputs = self._split(parts)
        prepared = None if inputs is None else self._known_by("all_to_all", inputs, None, None)
        return GENERAL_PATH if inputs is None or prepared is None else self._all(prepared, inputs, out)

    # By input. `prepared` is None for the general path.

    def _of(self, x: Any, name: str, root: Any, op: Any) -> ArenaPrepared | None:
        if type(x) is not np.ndarray or not x.flags.c_contiguous:
            return None
        return self._known_by(name, (x,), root, op)

    def _of_parts(self, parts: Any, name: str, root: Any, op: Any, out: Any) -> Any:
        """This rank's result of an operation on one part for each rank, or GENERAL_PATH."""
        inputs = self._split(parts)
        prepared = None if inputs is None else self._known_by(name, inputs, root, op)
        return GENERAL_PATH if inputs is None or prepared is None else self._one(prepared, inputs, inputs[self._rank], out)

    def _split(self, parts: Any) -> Sequence[Array] | None:
        if type(parts) is np.ndarray:
            return split(parts, self._size) if parts.ndim and parts.flags.c_contiguous else None
        if type(parts) is not list or len(parts) != self._size:
            return None
        for part in parts:
            if type(part) is not np.ndarray or not part.flags.c_contiguous:
                return None
        return parts

    def _from_root(self, name: str, root: Any, out: Any) -> Any:
        """The result off the root, which only the root describes, or GENERAL_PATH."""
        prepared = self._known_by(name, (), root, None)
        if prepared is None or not (out is None or _takes(out, (), None)):
            return GENERAL_PATH
        (result,), (spec,) = self._outcome(prepared, (), None if out is None else (out,))
        if out is None:
            return to_kind(NUMPY, result, spec)
        if result is out and spec.dtype is NATIVE[out.dtype]:
            return out
        return Into(out, None).give([result], [spec], prepared.signature)

    # By result.

    def _none(self, prepared: ArenaPrepared, x: Array, out: Any) -> Any:
        if out is not None and out is not x:
            return GENERAL_PATH
        self._run(prepared, (x,), None)
        return None

    def _one(self, prepared: ArenaPrepared, inputs: Sequence[Array], like: Array, out: Any) -> Any:
        """One result like `like`, or GENERAL_PATH."""
        if out is None:
            return self._outcome(prepared, inputs, None)[0][0]
        if not _takes(out, inputs, like):
            return GENERAL_PATH
        self._run(prepared, inputs, (out,))
        return out

    def _all(self, prepared: ArenaPrepared, inputs: Sequence[Array], out: Any) -> Any:
        """A result from every rank, or GENERAL_PATH."""
        if out is None:
            return self._outcome(prepared, inputs, None)[0]
        if not _takes(out, inputs, None) or not out.ndim or out is inputs[0]:
            return GENERAL_PATH
        targets = split(out, self._size)
        results, specs = self._outcome(prepared, inputs, targets)
        for result, target in zip(results, targets, strict=True):
            if result is not target:
                return IntoWhole(out, self._size).give(results, specs, prepared.signature)
        return out

    def _outcome(self, prepared: ArenaPrepared, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> Outcome:
        """The results and their specs."""
        found: list[Outcome] = []
        self._run(prepared, inputs, outputs, found)
        return found[0]

    def _run(
        self,
        prepared: ArenaPrepared,
        inputs: Sequence[Array],
        outputs: Sequence[Array] | None,
        found: list[Outcome] | None = None,
    ) -> None:
        dispatch = self._dispatch
        if dispatch.refuses or self._latch.cause is not None:
            dispatch.check_open()
        try:
            number = dispatch.next_number()
            if self._activity is not None:
                self._activity.note(prepared.signature)
            channel, before, base = prepared.claim(self._bank, number)
            steps = prepared.steps(channel, before, base, inputs, outputs)
            if found is not None:
                steps = _kept(steps, found)
            try:
                if self._spin(steps):
                    return
            except BaseException as error:  # noqa: BLE001  the general path reports it and raises the first cause
                steps = _failed(error)
            key = Key(dispatch.backend.group_id, 0, number)
            dispatch.run(ArenaExecution(self._arena, prepared.call, key, channel, steps, dispatch.guard(dispatch.timeout)))
        except KeyboardInterrupt:
            dispatch.interrupted(prepared.signature)
            raise

    def _known_by(self, name: str, inputs: Sequence[Array], root: Any, op: Any) -> ArenaPrepared | None:
        """The prepared call; None for the general path."""
        if root is not None and type(root) is not int:
            return None
        key = name, root, op, tuple([(each.dtype, each.shape) for each in inputs])
        try:
            found = self._known.get(key, UNKNOWN)
        except TypeError:  # a root or an operator that cannot be hashed is invalid
            return None
        return self._learn(key, name, inputs, root, op) if found is UNKNOWN else found

    def _learn(
        self, key: tuple[Any, ...], name: str, inputs: Sequence[Array], root: int | None, op: Any
    ) -> ArenaPrepared | None:
        if self._observed or len(self._known) >= CACHED_CALLS:
            return None
        if name in ROOTED and (root is None or not 0 <= root < self._size):
            return None
        if name in REDUCING and not isinstance(op, str | ReduceOp):
            return None
        dtypes = {each.dtype for each in inputs}
        if len(dtypes) > 1 or any(dtype.isbuiltin != 1 or dtype not in NATIVE for dtype in dtypes):
            return None
        if self._dispatch.refuses or self._latch.cause is not None:
            self._dispatch.check_open()
        specs = tuple([TensorSpec(NATIVE[each.dtype], each.shape) for each in inputs])
        found = self._known[key] = self._prepared(Operation(name), specs, None if op is None else ReduceOp.named(op), root)
        return found

    def _prepared(
        self,
        operation: Operation,
        inputs: tuple[TensorSpec, ...] = (),
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> ArenaPrepared | None:
        """The prepared call; None where it does not run in shared memory."""
        found = self._dispatch.prepared(operation, inputs, op, root)
        return found if isinstance(found, ArenaPrepared) else None


def _takes(out: Any, inputs: Sequence[Array], like: Array | None) -> bool:
    """Whether results can be written straight to `out`: it has dtype and shape of `like`, where that is known, and shares no
    memory with the inputs, except as a single input that is reduced in place.
    """
    if type(out) is not np.ndarray:
        return False
    flags = out.flags
    if not flags.carray:
        return False
    if out is like:
        return len(inputs) == 1
    if out.dtype not in NATIVE if like is None else (out.dtype != like.dtype or out.shape != like.shape):
        return False
    for each in inputs:
        if not (flags.owndata and each.flags.owndata and each is not out) and np.may_share_memory(out, each):
            return False
    return True


def _kept(steps: Steps, found: list[Outcome]) -> Steps:
    outcome = yield from steps
    if outcome is not None:
        found.append(outcome)
    return outcome


def _failed(error: BaseException) -> Generator[int, None, Any]:
    raise error
    yield 0
