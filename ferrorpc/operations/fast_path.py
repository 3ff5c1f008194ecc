"""The fast path for the most frequent calls: blocking collectives of NumPy arrays, where ranks share memory.

There an operation takes a few microseconds, and general argument checks and an execution object would cost as much again. So
for each operation, dtype, shape, root and operator this caches the prepared call, checks only what can differ between two
calls, and builds an execution only when the operation has to wait. Other arguments are read by the general path, which runs
blocking calls here, too; only all_reduce reads plain torch tensors itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from ferrorpc.arrays.base import View
from ferrorpc.arrays.device import is_host
from ferrorpc.arrays.kinds import NUMPY, kind_of, split, to_kind
from ferrorpc.arrays.numpy_kind import NATIVE
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import Channel, Steps
from ferrorpc.collectives.arena.execution import ArenaExecution, Outcome
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.execution import Prepared
from ferrorpc.guard import seconds_of
from ferrorpc.operations.dispatch import PREPARED_CALLS, Dispatch
from ferrorpc.operations.results import Result, into_one, into_whole
from ferrorpc.types import ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key

T = TypeVar("T")
Array = np.ndarray[Any, Any]

GENERAL_PATH: Final = object()
"""Returned in place of a result: the operation has not begun, and must take the general path."""
UNKNOWN: Final[Any] = object()
"""In place of a prepared call or None: not in the cache."""
NOTHING_GIVEN: Final[Any] = []
"""In place of an array or parts, off a root that alone gives some."""
REDUCING: Final = frozenset(("all_reduce", "reduce", "reduce_scatter"))
OF_PARTS: Final = frozenset(("scatter", "reduce_scatter", "all_to_all"))
ROOTED: Final = frozenset(("broadcast", "reduce", "gather", "scatter"))


class FastPath:
    """The fast path of one group without telemetry, to which the general path reports every operation.

    Its operations are those of `Collectives`, without the arguments it does not support.

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
        self._known: dict[tuple[Any, ...], ArenaPrepared | None] = {}
        self._barrier = self._prepared(Operation.BARRIER)

    def barrier(self, timeout: Any) -> bool:
        """A barrier. Returns False if it must take the general path."""
        if self._barrier is None:
            return False
        self._run(self._barrier, (), None, timeout, [])
        return True

    def all_reduce(self, x: Any, op: Any, out: Any, timeout: Any) -> Any:
        """The result, or GENERAL_PATH. As the most frequent call it has its steps inline."""
        if type(x) is not np.ndarray:
            return self._all_reduce_shared(x, op, out, timeout)
        key = x.dtype, x.shape, op
        try:
            prepared = self._known.get(key, UNKNOWN)
        except TypeError:  # an operator that cannot be hashed is invalid
            return GENERAL_PATH
        if prepared is UNKNOWN:
            prepared = self._learn(key, "all_reduce", x, None, op)
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
        elif not _takes(out, x, x):
            return GENERAL_PATH
        self._run(prepared, (x,), (out,), timeout, [])
        return out

    def _all_reduce_shared(self, x: Any, op: Any, out: Any, timeout: Any) -> Any:
        """As `all_reduce`, of tensors whose memory NumPy can share."""
        kind = kind_of(x)
        source = kind.memory(x)
        if source is None:
            return GENERAL_PATH
        target = None
        if out is not None:
            target = source if out is x else kind.memory(out)
            if target is None:
                return GENERAL_PATH
            kind.will_write(out)
        found = self.all_reduce(source, op, target, timeout)
        if found is GENERAL_PATH:
            return GENERAL_PATH
        return out if found is target else kind.wrap(found, TensorSpec(NATIVE[found.dtype], found.shape))

    def reduce(self, x: Any, root: Any, op: Any, out: Any, timeout: Any) -> Any:
        """The result, None off the root, or GENERAL_PATH."""
        prepared = self._of(x, "reduce", root, op)
        if prepared is None:
            return GENERAL_PATH
        return self._one(prepared, (x,), x, x, out, timeout) if root == self._rank else self._none(prepared, x, out, timeout)

    def gather(self, x: Any, root: Any, out: Any, timeout: Any) -> Any:
        """The results, None off the root, or GENERAL_PATH."""
        prepared = self._of(x, "gather", root, None)
        if prepared is None:
            return GENERAL_PATH
        return self._all(prepared, (x,), x, out, timeout) if root == self._rank else self._none(prepared, x, out, timeout)

    def broadcast(self, x: Any, root: Any, out: Any, timeout: Any) -> Any:
        """The result, or GENERAL_PATH."""
        if type(root) is int and root == self._rank:
            prepared = self._of(x, "broadcast", root, None)
            return GENERAL_PATH if prepared is None else self._one(prepared, (x,), x, x, out, timeout)
        return self._from_root("broadcast", root, out, timeout) if x is None or x is out else GENERAL_PATH

    def scatter(self, parts: Any, root: Any, out: Any, timeout: Any) -> Any:
        """The result, or GENERAL_PATH."""
        if type(root) is int and root == self._rank:
            return self._one_of_parts(parts, "scatter", root, None, out, timeout)
        return self._from_root("scatter", root, out, timeout) if parts is None else GENERAL_PATH

    def all_gather(self, x: Any, out: Any, timeout: Any) -> Any:
        """The results, or GENERAL_PATH."""
        prepared = self._of(x, "all_gather", None, None)
        return GENERAL_PATH if prepared is None else self._all(prepared, (x,), x, out, timeout)

    def reduce_scatter(self, parts: Any, op: Any, out: Any, timeout: Any) -> Any:
        """The result, or GENERAL_PATH."""
        return self._one_of_parts(parts, "reduce_scatter", None, op, out, timeout)

    def all_to_all(self, parts: Any, out: Any, timeout: Any) -> Any:
        """The results, or GENERAL_PATH."""
        prepared = self._of(parts, "all_to_all", None, None)
        return GENERAL_PATH if prepared is None else self._all(prepared, self._parts(parts), parts, out, timeout)

    def run(self, prepared: Prepared, sources: Sequence[View], result: Result, seconds: float) -> Any:
        """The result of a call whose arguments the general path has read, or GENERAL_PATH."""
        inputs = [source.data for source in sources]
        if result.on_device or not isinstance(prepared, ArenaPrepared) or not all(map(is_host, inputs)):
            return GENERAL_PATH
        found: list[Outcome] = []
        number = self._run(prepared, inputs, result.targets, seconds, found)
        return result.give(*found[0], f"{prepared.signature} #{number}")

    # By what is given: an array, or one part for each rank.

    def _of(self, given: Any, name: str, root: Any, op: Any) -> ArenaPrepared | None:
        """The prepared call; None for the general path."""
        key: tuple[Any, ...]
        if type(given) is np.ndarray:
            if not given.flags.c_contiguous:
                return None
            key = name, given.dtype, given.shape, root, op
        elif type(given) is list and len(given) == self._size and name in OF_PARTS:
            for part in given:
                if type(part) is not np.ndarray or not part.flags.c_contiguous:
                    return None
            key = name, tuple([(part.dtype, part.shape) for part in given]), root, op
        elif given is NOTHING_GIVEN:
            key = name, root
        else:
            return None
        if root is not None and type(root) is not int:
            return None
        try:
            found = self._known.get(key, UNKNOWN)
        except TypeError:  # an operator that cannot be hashed is invalid
            return None
        return self._learn(key, name, given, root, op) if found is UNKNOWN else found

    def _parts(self, given: Any) -> Sequence[Array]:
        """One array for each rank."""
        return split(given, self._size) if type(given) is np.ndarray else given

    def _one_of_parts(self, given: Any, name: str, root: Any, op: Any, out: Any, timeout: Any) -> Any:
        """This rank's result of an operation on one part for each rank, or GENERAL_PATH."""
        prepared = self._of(given, name, root, op)
        if prepared is None:
            return GENERAL_PATH
        parts = self._parts(given)
        return self._one(prepared, parts, given, parts[self._rank], out, timeout)

    def _from_root(self, name: str, root: Any, out: Any, timeout: Any) -> Any:
        """The result off the root, which only the root describes, or GENERAL_PATH."""
        prepared = self._of(NOTHING_GIVEN, name, root, None)
        if prepared is None or not (out is None or _takes(out, NOTHING_GIVEN, None)):
            return GENERAL_PATH
        found: list[Outcome] = []
        number = self._run(prepared, (), None if out is None else (out,), timeout, found)
        (result,), (spec,) = found[0]
        if out is None:
            return to_kind(NUMPY, result, spec)
        if result is out and spec.dtype is NATIVE[out.dtype]:
            return out
        return into_one(out, None).give([result], [spec], f"{prepared.signature} #{number}")

    # By result.

    def _none(self, prepared: ArenaPrepared, x: Array, out: Any, timeout: Any) -> Any:
        if out is not None and not (type(out) is np.ndarray and out.dtype in NATIVE):
            return GENERAL_PATH
        self._run(prepared, (x,), None, timeout, [])
        return None

    def _one(self, prepared: ArenaPrepared, inputs: Sequence[Array], given: Any, like: Array, out: Any, timeout: Any) -> Any:
        """One result like `like`, or GENERAL_PATH."""
        if out is None:
            out = np.empty(like.shape, like.dtype)
        elif not _takes(out, given, like):
            return GENERAL_PATH
        self._run(prepared, inputs, (out,), timeout, [])
        return out

    def _all(self, prepared: ArenaPrepared, inputs: Sequence[Array], given: Any, out: Any, timeout: Any) -> Any:
        """A result from every rank, or GENERAL_PATH."""
        found: list[Outcome] = []
        if out is None:
            self._run(prepared, inputs, None, timeout, found)
            return found[0][0]
        if not _takes(out, given, None) or not out.ndim:
            return GENERAL_PATH
        targets = split(out, self._size)
        number = self._run(prepared, inputs, targets, timeout, found)
        if found[0][0] is targets:
            return out
        return into_whole(out, self._size).give(*found[0], f"{prepared.signature} #{number}")

    def _run(
        self,
        prepared: ArenaPrepared,
        inputs: Sequence[Array],
        outputs: Sequence[Array] | None,
        timeout: Any,
        found: list[Outcome],
    ) -> int:
        """Runs a call. Returns its number; `found` gets its results and their specs."""
        dispatch = self._dispatch
        if dispatch.refuses or self._latch.cause is not None or self._latch.ended_here:
            dispatch.check_open()
        seconds = dispatch.timeout if timeout is None else seconds_of(timeout, dispatch.timeout)
        try:
            number = dispatch.next_number()
            if self._activity is not None:
                self._activity.note(prepared.signature)
            claim = prepared.claim(self._bank, number)
            steps = prepared.steps(claim, inputs, outputs, found)
            try:
                is_over = self._spin(steps)
            except BaseException as error:  # noqa: BLE001  the general path reports it and raises the first cause
                execution = self._execution(prepared, number, claim[0], steps, found, seconds)
                execution.begin_failed(error)
            else:
                if is_over:
                    if self._latch.ended_here:
                        dispatch.check_open()
                    return number
                execution = self._execution(prepared, number, claim[0], steps, found, seconds)
            dispatch.run(execution)
            return number
        except BaseException as error:
            dispatch.struck(prepared.signature, error)
            raise

    def _execution(
        self, prepared: ArenaPrepared, number: int, channel: Channel, steps: Steps, found: list[Outcome], seconds: float
    ) -> ArenaExecution:
        """The rest of a run, for the general path."""
        dispatch = self._dispatch
        key, guard = Key(dispatch.backend.group_id, 0, number), dispatch.guard(seconds)
        return ArenaExecution(self._arena, prepared.call, key, channel, steps, guard, found)

    def _learn(self, key: tuple[Any, ...], name: str, given: Any, root: int | None, op: Any) -> ArenaPrepared | None:
        if name in ROOTED and (root is None or not 0 <= root < self._size):
            return None
        if name in REDUCING and not isinstance(op, str | ReduceOp):
            return None
        inputs = given
        if type(given) is np.ndarray:
            if name in OF_PARTS and not given.ndim:
                return None
            inputs = self._parts(given) if name in OF_PARTS else [given]
        dtypes = {each.dtype for each in inputs}
        if len(dtypes) > 1 or any(dtype.isbuiltin != 1 or dtype not in NATIVE for dtype in dtypes):
            return None
        if self._dispatch.refuses or self._latch.cause is not None or self._latch.ended_here:
            self._dispatch.check_open()
        specs = tuple([TensorSpec(NATIVE[each.dtype], each.shape) for each in inputs])
        found = self._prepared(Operation(name), specs, None if op is None else ReduceOp.named(op), root)
        remember(self._known, key, found)
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


def remember(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], found: T) -> None:
    """Caches a call. A full cache is emptied first, because that costs least: `Dispatch` still has the latest calls."""
    if len(known) >= PREPARED_CALLS:
        known.clear()
    known[key] = found


def _takes(out: Any, given: Any, like: Array | None) -> bool:
    """Whether results can be written straight to `out`: it has dtype and shape of `like`, where that is known, and shares no
    memory with what is given (an array or a list of them), except where it is the array itself and so is `like`.
    """
    if type(out) is not np.ndarray:
        return False
    flags = out.flags
    if not flags.carray:
        return False
    if out is given:
        return like is given
    if out.dtype not in NATIVE if like is None else (out.dtype != like.dtype or out.shape != like.shape):
        return False
    owned = flags.owndata
    for each in given if type(given) is list else (given,):
        if not (owned and each.flags.owndata and each is not out) and np.may_share_memory(out, each):
            return False
    return True
