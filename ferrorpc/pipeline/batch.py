"""Batches and microbatches: splitting a batch, joining outputs, and the weight of each microbatch's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from ferrorpc.arrays.base import Kind
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import copied, kind_of, spec_of
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import number_of

Shapes: TypeAlias = "tuple[int, ...] | list[Shapes] | None"
"""Of a value: see `shapes_of`."""


def rows(value: Any, what: str) -> int:
    """The length of an array, or of all arrays of a tuple, along axis 0. Nones in a tuple do not count.

    Raises:
        UsageError: there is no axis 0, or the arrays of the tuple differ in length.
    """
    counts = {_rows(each, what) for each in value if each is not None} if isinstance(value, tuple) else {_rows(value, what)}
    if len(counts) != 1:
        raise UsageError(f"the arrays of {what} have {sorted(counts)} rows", hint="give them the same length along axis 0")
    return counts.pop()


def split(value: Any, count: int, what: str) -> list[Any]:
    """The microbatches of a batch: a list as it is; an array, or a tuple of arrays, cut along axis 0 as by np.array_split.

    Raises:
        UsageError: there is no batch, the list has another length, or there are fewer rows than microbatches.
    """
    if value is None:
        raise UsageError(
            f"{what} is None on the rank that needs it", hint="pass x where the first stage is, target where the last is"
        )
    if isinstance(value, list):
        if len(value) != count:
            raise UsageError(
                f"{what} is a list of {len(value)} microbatches, but the schedule has {count}",
                hint=f"pass a list of {count}, or the whole batch as an array",
            )
        return value
    total = rows(value, what)
    if total < count:
        raise UsageError(
            f"{what} has {total} rows, too few for {count} microbatches", hint="use fewer microbatches, or larger batches"
        )
    each, more = divmod(total, count)
    return cut(value, [each + (number < more) for number in range(count)])


def cut(value: Any, counts: Sequence[int]) -> list[Any]:
    """Cuts a value along axis 0 into parts of so many rows."""
    parts = []
    for start, stop in pairwise(accumulate(counts, initial=0)):
        if isinstance(value, tuple):
            parts.append(tuple_like(value, [None if each is None else each[start:stop] for each in value]))
        else:
            parts.append(value[start:stop])
    return parts


def tuple_like(value: Any, members: Sequence[Any]) -> Any:
    """A tuple of these members, a named one if `value` is, also one of torch, such as `torch.return_types.max`."""
    is_of_torch = hasattr(type(value), "n_sequence_fields")
    return type(value)(members) if is_of_torch else getattr(type(value), "_make", tuple)(members)


def join(parts: Sequence[Any], what: str) -> Any:
    """Concatenates parts along axis 0 into a new array of their kind, or a tuple of such, as they are; None if all are None.

    Raises:
        TensorMismatchError: they differ in dtype, in shape beyond axis 0, or in whether they are tuples or None.
    """
    if isinstance(parts[0], tuple) and all(isinstance(part, tuple) and len(part) == len(parts[0]) for part in parts):
        return tuple_like(parts[0], [join([part[place] for part in parts], what) for place in range(len(parts[0]))])
    if all(part is None for part in parts):
        return None
    specs = [spec_of(part) for part in parts if not (part is None or isinstance(part, tuple))]
    kinds = {(spec.dtype, spec.shape[1:]) for spec in specs if spec.shape}
    if len(specs) < len(parts) or len(kinds) != 1 or not all(spec.shape for spec in specs):
        shown = ", ".join(_shown(part) for part in parts)
        raise TensorMismatchError(
            f"{what} cannot be joined along axis 0: {shown}", hint="use pipe.step, which does not join outputs"
        )
    whole = kind_of(parts[0]).empty((sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]), specs[0].dtype)
    start = 0
    for part, spec in zip(parts, specs, strict=True):
        whole[start : start + spec.shape[0]] = part
        start += spec.shape[0]
    return whole


def _shown(part: Any) -> str:
    if isinstance(part, tuple):
        return f"a tuple of {len(part)}"
    return "None" if part is None else str(spec_of(part))


def check_reduction(reduction: str, weight: Callable[[Any], float] | None) -> None:
    """Raises UsageError if there is no such reduction, or if it has no use for `weight`."""
    if reduction not in ("mean", "sum"):
        raise UsageError(f"there is no reduction {reduction!r}", hint='use "mean" or "sum", as loss_fn does')
    if weight is None:
        return
    if reduction == "sum":
        raise UsageError('weights mean nothing with reduction="sum"', hint='use reduction="mean"')
    if not callable(weight):
        raise UsageError(f"weight={weight!r} is no function", hint="weight(target) -> what it counts, such as its tokens")


def loss_weights(targets: Sequence[Any], reduction: str, weight: Callable[[Any], float] | None) -> list[float]:
    """The factor of each microbatch's loss in the batch's: its share of the batch for "mean", 1 for "sum".

    Args:
        weight: gives what a microbatch counts from its target, such as the number of tokens; None for the number of rows.

    Raises:
        UsageError: weights are no numbers, or negative.
    """
    if reduction == "sum":
        return [1.0] * len(targets)
    weights = [rows(target, "target") if weight is None else weight(target) for target in targets]
    numbers = [number_of(each) for each in weights]
    total = sum(numbers)
    if not 0 <= total < math.inf or min(numbers) < 0:
        raise UsageError(
            f"microbatches weigh {weights}, which is no share of a batch",
            hint="let weight(target) give a number of rows or tokens, 0 or more",
        )
    return [each / total if total else 0.0 for each in numbers]


def shapes_of(value: Any) -> Shapes:
    """The shape of an array; of a tuple, a list with that of each member; None of None."""
    if isinstance(value, tuple):
        return [shapes_of(each) for each in value]
    return None if value is None else tuple(getattr(value, "shape", ()))  # not by spec_of: it may require a gradient


def check_like(grad: Any, shapes: Shapes, what: str, of: str) -> None:
    """Raises UsageError if `grad` cannot be a gradient of these shapes. A gradient may be None.

    Args:
        what: the gradient is, and `of`: what it is of, for errors.
    """
    if grad is None or shapes is None:
        return
    if isinstance(grad, tuple) != isinstance(shapes, list):
        given, made = ("a tuple of gradients", "one array") if isinstance(grad, tuple) else ("one gradient", "a tuple")
        raise UsageError(f"{what}: gave {given}, but {of} is {made}", hint=f"give a gradient for each array of {of}")
    if isinstance(shapes, list):
        if len(grad) != len(shapes):
            hint = "give a gradient, or None, for each"
            raise UsageError(f"{what}: gave {len(grad)}, but {of} has {len(shapes)} arrays", hint=hint)
        for one, shape in zip(grad, shapes, strict=True):
            check_like(one, shape, what, of)
        return
    with ErrorPrefix(what):
        shape = spec_of(grad).shape
    if shape != shapes:
        hint = f"give one gradient for each element of {of}"
        raise UsageError(f"{what}: has shape {shape}, but {of} has {shapes}", hint=hint)


def scaled(value: Any, factor: float) -> Any:
    """The value times a factor, in its dtype, as a new array."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    product = value * factor
    # NumPy widens bfloat16 times a number to float32.
    is_bfloat16 = isinstance(value, np.ndarray) and value.dtype.kind == "V"
    return product.astype(value.dtype) if is_bfloat16 else product


def converted(value: Any, kind: Kind) -> Any:
    """The value with arrays of this kind: copies, except of those that are. Raises as `view`."""
    if isinstance(value, tuple):
        return tuple_like(value, [converted(each, kind) for each in value])
    return value if value is None or kind_of(value) is kind else copied(value, kind)


def _rows(value: Any, what: str) -> int:
    shape = getattr(value, "shape", None)
    if not shape:
        raise UsageError(
            f"{what} is a {type(value).__name__} without rows",
            hint="pass an array, a tuple of arrays, or a list of microbatches; weight= says what a target without rows counts",
        )
    return int(shape[0])
