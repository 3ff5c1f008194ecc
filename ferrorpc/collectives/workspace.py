"""The arrays of one running plan, and what its actions do to them. Knows nothing of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.collectives.algorithms.plan import (
    Action,
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
)
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError
from ferrorpc.kernels.reduction import Kernel, kernel
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.codecs import Codec, codec

Array = np.ndarray[Any, Any]
NOTHING = TensorSpec(DType.UINT8, (0,))


class Rules:
    """What is the same for every run of a prepared call: its kernel, its codec, the specs of what comes out."""

    def __init__(self, call: Call, plan: Plan, rank: int, size: int) -> None:
        self.call = call
        self.plan = plan
        self.kernel: Kernel | None = kernel(call.op, call.inputs[0].dtype, size) if call.op is not None else None
        self.codec: Codec | None = codec(call.wire) if call.wire is not None else None
        self.dtype = call.inputs[0].dtype if call.inputs else DType.UINT8
        self.work_dtype = DType.FLOAT32 if self.dtype.is_half and self.kernel is not None else self.dtype
        self.work_storage = self.dtype.storage if self.kernel is None else self.kernel.work
        self.out_specs: list[TensorSpec | None] = [None] * plan.out_items
        if plan.alike or call.operation in (Operation.ALL_REDUCE, Operation.REDUCE):
            self.out_specs = [call.inputs[0]] * plan.out_items
        elif call.operation is Operation.REDUCE_SCATTER:
            self.out_specs = [call.inputs[rank]]


class Workspace:
    """IN, WORK and OUT of one run.

    Args:
        inputs: C-contiguous storage arrays.
        outputs: arrays to write results into where they fit, or None to allocate.
    """

    def __init__(self, rules: Rules, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> None:
        self._rules = rules
        self._inputs = inputs
        self._given = outputs
        self._work = [np.empty(count, rules.work_storage) for count in rules.plan.work_items]
        self.specs: list[TensorSpec | None] = list(rules.out_specs)
        self._out: list[Array | None] = [
            None if spec is None else self._room(item, spec) for item, spec in enumerate(rules.out_specs)
        ]

    def _room(self, item: int, spec: TensorSpec) -> Array:
        """The array for a result: the caller's where it fits, else a new one."""
        if self._given is not None and item < len(self._given):
            given = self._given[item]
            if given.shape == spec.shape and given.dtype == spec.dtype.storage:
                return given
        return np.empty(spec.shape, spec.dtype.storage)

    @property
    def results(self) -> tuple[list[Array], list[TensorSpec]]:
        """The OUT arrays and their specs, once the plan is done."""
        arrays = [array for array in self._out if array is not None]
        return arrays, [spec for spec in self.specs if spec is not None]

    def outgoing(self, region: Region) -> tuple[TensorSpec, Array]:
        """What a Send of this region carries: its spec, and its contiguous bytes as uint8."""
        if region.start == region.stop:
            return NOTHING, np.empty(0, np.uint8)
        array, spec = self._item(region)
        flat = array.reshape(-1)[region.start : region.stop]
        if self._rules.codec is not None:
            encoded = self._rules.codec.encode(flat)
            return TensorSpec(DType.UINT8, encoded.shape), encoded
        whole = region.stop is None and region.start == 0
        return (spec if whole else TensorSpec(spec.dtype, (flat.size,))), flat.view(np.uint8)

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

    def expect(self, action: Receive | Fold | FoldUnder, spec: TensorSpec) -> None:
        """A message begins to arrive for this action. Allocates whole results from the message's own description.

        Raises:
            CodecError: its size is not that of the region, although the signatures agree.
        """
        region = action.region
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

    def accept(self, action: Receive | Fold | FoldUnder, spec: TensorSpec, first: int, data: Array) -> None:
        """Elements of a message, `data` in its storage dtype, beginning at element `first`, are folded in or stored."""
        region = action.region
        if not data.size:
            return
        target = self._flat(region)[first : first + data.size]
        if isinstance(action, Receive):
            if region.buffer is Buffer.WORK and spec.dtype is not self._rules.work_dtype:
                self._kernel.load(target, data)
            else:
                target[...] = data
            return
        in_work = spec.dtype is self._rules.work_dtype and self._rules.dtype.is_half
        if isinstance(action, Fold):
            (self._kernel.fold_work if in_work else self._kernel.fold)(target, data)
        else:
            (self._kernel.fold_under_work if in_work else self._kernel.fold_under)(target, data)

    def accept_encoded(self, action: Receive | Fold | FoldUnder, message: Array) -> None:
        """A whole message of a compressed call: decoded, then folded in or stored."""
        if self._rules.codec is None:
            raise AssertionError("only compressed calls have encoded messages")
        count = self._flat(action.region).size
        data = self._rules.codec.decode(message, count)
        self.accept(action, TensorSpec(DType.FLOAT32, (count,)), 0, data)

    @property
    def _kernel(self) -> Kernel:
        if self._rules.kernel is None:
            raise AssertionError(f"{self._rules.call.signature} reduces nothing")
        return self._rules.kernel

    def apply(self, action: Action) -> None:
        """An action that needs no message."""
        if isinstance(action, Load):
            self._load(action)
        elif isinstance(action, FoldOwn):
            fold = self._kernel.fold_work if action.source.buffer is Buffer.WORK else self._kernel.fold
            fold(self._flat(action.region), self._flat(action.source))
        elif isinstance(action, Finish):
            self._kernel.finish(self._flat(action.region), self._flat(action.source))
        elif isinstance(action, Copy):
            self._copy(action)
        elif isinstance(action, Quantise):
            self._quantise(action)

    def _load(self, action: Load) -> None:
        target, source = self._flat(action.region), self._flat(action.source)
        if self._rules.kernel is None or action.source.buffer is Buffer.WORK:
            target[...] = source
        else:
            self._rules.kernel.load(target, source)

    def _copy(self, action: Copy) -> None:
        item = action.region.item
        source, spec = self._item(action.source)
        if action.region.stop is None and self.specs[item] is None:
            self.specs[item] = spec
            self._out[item] = self._room(item, spec)
        target = self._flat(action.region)
        if target.size:
            target[...] = source.reshape(-1)[action.source.start : action.source.stop]

    def _quantise(self, action: Quantise) -> None:
        target = self._flat(action.region)
        if self._rules.codec is not None and target.size:
            target[...] = self._rules.codec.decode(self._rules.codec.encode(target), target.size)
