"""The arrays of one running plan, and the arithmetic of its actions. Messages are the executor's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.collectives.algorithms.plan import (
    Buffer,
    Copy,
    Finish,
    Fold,
    FoldOwn,
    FoldUnder,
    Load,
    Plan,
    Quantise,
    Receive,
    Region,
    Send,
)
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.fusion import Reduce, Task, used_work
from ferrorpc.errors import CodecError
from ferrorpc.kernels.reduction import Kernel, kernel
from ferrorpc.types import DType, TensorSpec, fits
from ferrorpc.wire.codecs import Codec, codec

Array = np.ndarray[Any, Any]
NOTHING = TensorSpec(DType.UINT8, (0,))


class Rules:
    """What all runs of a prepared call share: kernel, codec, specs of the results.

    Args:
        tasks: the plan's actions, fused as the executor runs them.
    """

    def __init__(self, call: Call, plan: Plan, tasks: tuple[Task, ...], rank: int, size: int) -> None:
        self.call = call
        self.tasks = tasks
        self.work_items = used_work(tasks, plan)
        self.kernel: Kernel | None = kernel(call.op, call.inputs[0].dtype, size) if call.op is not None else None
        self.codec: Codec | None = codec(call.wire) if call.wire is not None else None
        self.dtype = call.inputs[0].dtype if call.inputs else DType.UINT8
        self.work_dtype = DType.FLOAT32 if self.dtype.is_half and self.kernel is not None else self.dtype
        self.work_storage = self.work_dtype.storage
        self.out_specs: list[TensorSpec | None] = [None] * plan.out_items
        if plan.alike or call.operation in (Operation.ALL_REDUCE, Operation.REDUCE):
            self.out_specs = [call.inputs[0]] * plan.out_items
        elif call.operation is Operation.REDUCE_SCATTER:
            self.out_specs = [call.inputs[rank]]
        self.sharing = {} if self.codec is None else _sharing(tasks)


def _sharing(tasks: tuple[Task, ...]) -> dict[int, tuple[int, int]]:
    """Actions that encode the same elements: index -> (the first such action, how many there are).

    Nothing writes to these elements in between, whichever arrays share memory.
    """
    alike: dict[Region, list[int]] = {}
    closed: list[list[int]] = []
    for index, action in enumerate(tasks):
        if isinstance(action, Send | Quantise):
            alike.setdefault(action.region, []).append(index)
        if not isinstance(action, Send):
            closed += [alike.pop(region) for region in list(alike) if _overlap(region, action.region)]
    return {index: (indices[0], len(indices)) for indices in (*closed, *alike.values()) for index in indices}


def _overlap(one: Region, other: Region) -> bool:
    """Whether two regions of arrays that may be the same have elements in common."""
    return (other.stop is None or one.start < other.stop) and (one.stop is None or other.start < one.stop)


def fitting(outputs: Sequence[Any] | None, item: int, spec: TensorSpec) -> Any:
    """The caller's array for a result, on the host or on a device; None where there is none, or it does not fit."""
    given = None if outputs is None or item >= len(outputs) else outputs[item]
    return given if given is not None and fits(given, spec) else None


def room_for(outputs: Sequence[Array | None] | None, item: int, spec: TensorSpec) -> Array:
    """The array for a result on the host: the caller's where it fits, else a new one."""
    given: Array | None = fitting(outputs, item, spec)
    return np.empty(spec.shape, spec.dtype.storage) if given is None else given


class Workspace:
    """IN, WORK and OUT of one run.

    Args:
        inputs: C-contiguous storage arrays.
        outputs: arrays for results, used where they fit; None in place of one or of all to allocate.
    """

    def __init__(self, rules: Rules, inputs: Sequence[Array], outputs: Sequence[Array | None] | None) -> None:
        self._rules = rules
        self._inputs = inputs
        self._given = outputs
        self._work = [np.empty(count, rules.work_storage) for count in rules.work_items]
        self.specs: list[TensorSpec | None] = list(rules.out_specs)
        self._out: list[Array | None] = [
            None if spec is None else self._room(item, spec) for item, spec in enumerate(rules.out_specs)
        ]
        self._encodings: dict[tuple[int, int], tuple[Array, int]] = {}

    def _room(self, item: int, spec: TensorSpec) -> Array:
        return room_for(self._given, item, spec)

    @property
    def results(self) -> tuple[list[Array], list[TensorSpec]]:
        """The OUT arrays and their specs, once the plan is done."""
        arrays = [array for array in self._out if array is not None]
        return arrays, [spec for spec in self.specs if spec is not None]

    def outgoing(self, region: Region) -> tuple[TensorSpec, Array]:
        """The contents of a Send of this region: spec and elements as stored, not yet encoded."""
        if region.start == region.stop:
            return NOTHING, np.empty(0, np.uint8)
        array, spec = self._item(region)
        flat = array.reshape(-1)[region.start : region.stop]
        whole = region.stop is None and region.start == 0
        return (spec if whole else TensorSpec(spec.dtype, (flat.size,))), flat

    def encoded(self, index: int, first: int, last: int) -> Array:
        """Elements [first, last) of the region of action `index`, encoded by the call's codec.

        Where several actions need the same, the encoding is kept until the last of them has taken it.
        """
        group, users = self._rules.sharing[index]
        found, left = self._encodings.pop((group, first), (None, users))
        if found is None:
            found = self._codec.encode(self._flat(self._rules.tasks[index].region)[first:last])
        if left > 1:
            self._encodings[group, first] = found, left - 1
        return found

    def _item(self, region: Region) -> tuple[Array, TensorSpec]:
        if region.buffer is Buffer.IN:
            return self._inputs[region.item], self._rules.call.inputs[region.item]
        if region.buffer is Buffer.WORK:
            array: Array | None = self._work[region.item]
            spec: TensorSpec | None = TensorSpec(self._rules.work_dtype, self._work[region.item].shape)
        else:
            array, spec = self._out[region.item], self.specs[region.item]
        if array is None or spec is None:
            raise AssertionError(f"the plan uses {region} before anything was put there")
        return array, spec

    def _flat(self, region: Region) -> Array:
        return self._item(region)[0].reshape(-1)[region.start : region.stop]

    def expect(self, region: Region, spec: TensorSpec) -> None:
        """Checks the spec of a message for a region, when its first chunk arrives. Allocates whole results from the spec.

        Raises:
            CodecError: the message and the region differ in size, although the signatures agree.
        """
        if region.buffer is Buffer.OUT and region.stop is None and region.start == 0:
            if self.specs[region.item] is None:
                self.specs[region.item] = spec
                self._out[region.item] = self._room(region.item, spec)
            return
        expected = 0 if region.start == region.stop else self._flat(region).size
        if self._rules.codec is not None:
            expected = self._rules.codec.encoded_bytes(expected)
        count = spec.shape[0] if len(spec.shape) == 1 else -1
        if count != expected:
            raise CodecError(f"a message of {spec} came for {region}, which holds {expected} elements")

    def accept(self, action: Receive | Fold | FoldUnder, first: int, data: Array) -> None:
        """Folds or stores elements of a message, beginning at element `first`."""
        region = action.region
        if not data.size:
            return
        target = self._flat(region)[first : first + data.size]
        if isinstance(action, Fold):
            self._kernel.fold(target, data)
        elif isinstance(action, FoldUnder):
            self._kernel.fold(target, data, under=True)
        elif region.buffer is Buffer.WORK:
            self._load(target, data)
        else:
            target[...] = data

    def reduce(self, task: Reduce, messages: Sequence[Array], first: int, last: int) -> None:
        """Computes elements [first, last) of a reduction. `messages`: those of its messages, in order."""
        come = iter(messages)
        parts = [self._flat(operand)[first:last] if isinstance(operand, Region) else next(come) for operand in task.operands]
        target = self._flat(task.region)[first:last]
        if all(part.dtype == self._rules.dtype.storage for part in parts):
            self._kernel.reduce(parts, target)
            return
        work = np.empty(last - first, self._kernel.work)
        self._kernel.load(work, parts[0])
        for part in parts[1:]:
            self._kernel.fold(work, part)
        self._kernel.finish(target, work)

    def _load(self, work: Array, data: Array) -> None:
        """As `Kernel.load`, also where a plan that only moves data has arrays for it in between, and no kernel."""
        np.copyto(work, data) if self._rules.kernel is None else self._rules.kernel.load(work, data)

    @property
    def _codec(self) -> Codec:
        assert self._rules.codec is not None, f"{self._rules.call.signature} compresses nothing"
        return self._rules.codec

    @property
    def _kernel(self) -> Kernel:
        assert self._rules.kernel is not None, f"{self._rules.call.signature} reduces nothing"
        return self._rules.kernel

    def array(self, region: Region) -> Array:
        """The array that a region is part of."""
        return self._item(region)[0]

    def elements(self, action: Task) -> int:
        """How many elements an action processes. Its array must exist."""
        return self._flat(action.source if isinstance(action, Copy) else action.region).size

    def apply(self, index: int, first: int, last: int) -> None:
        """Does elements [first, last) of action `index`, which needs no message."""
        action = self._rules.tasks[index]
        if isinstance(action, Copy) and action.region.stop is None and self.specs[action.region.item] is None:
            self._allocate(action)
        if first == last:
            return
        target = self._flat(action.region)[first:last]
        if isinstance(action, Quantise):
            self._quantise(index, first, last, target)
        elif isinstance(action, Load | FoldOwn | Finish | Copy):
            self._compute(action, target, self._flat(action.source)[first:last])

    def _quantise(self, index: int, first: int, last: int, target: Array) -> None:
        self._codec.decode_to(target, self.encoded(index, first, last))

    def _compute(self, action: Load | FoldOwn | Finish | Copy, target: Array, source: Array) -> None:
        if isinstance(action, Copy):
            target[...] = source
        elif isinstance(action, Load):
            self._load(target, source)
        elif isinstance(action, FoldOwn):
            self._kernel.fold(target, source)
        else:
            self._kernel.finish(target, source)

    def _allocate(self, copy: Copy) -> None:
        """Allocates a result that is a copy of a whole array."""
        _, spec = self._item(copy.source)
        self.specs[copy.region.item] = spec
        self._out[copy.region.item] = self._room(copy.region.item, spec)
