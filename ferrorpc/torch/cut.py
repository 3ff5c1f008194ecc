"""Cuts a sequence of modules into pieces of about equal size or time, for the stages of a pipeline.

The most expensive piece determines the speed of a pipeline, so its cost is minimised; exactly, in O(pieces * modules^2).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.guard import SYSTEM_CLOCK, Clock

_SAMPLE: Final = "pass sample=, a microbatch of the model's input"
REPETITIONS = 5
"""How often each module is timed. The fastest run counts, because disturbances only slow a run down."""


def cut(
    model: torch.nn.Sequential,
    pieces: int,
    by: str = "parameters",
    *,
    sample: Any = None,
    group: ProcessGroup | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> list[torch.nn.Sequential]:
    """Cuts the model into sequences, one for each piece of a pipeline (`schedule.virtual_stages` of them).

    They hold the model's own modules under their own names. A weight that modules in two pieces share must be tied
    (`Pipeline(tied=)`), and an optimizer takes it once. A named tuple comes to a piece on another rank as a plain one.

    Args:
        by: "parameters" counts them; "time" measures the forward and backward pass of each module on a sample.
        sample: a microbatch of the model's input, a tensor or a tuple of them; needed for "time".
        group: with "time", all its ranks must call this, and use what its rank 0 measured; leave it out in one process.
        clock: for the measurements.

    Raises:
        UsageError: the model is no Sequential, or has a forward() of its own; it has fewer modules than pieces, `by` is
            unknown, or `sample` is missing; a module cannot be measured in this way.
    """
    _check(model, pieces)
    if not 1 <= pieces <= len(model):
        raise UsageError(f"{len(model)} modules cannot be cut into {pieces} pieces", hint="use fewer stages or chunks")
    if by == "parameters":
        costs = [_size(name, module) for name, module in model._modules.items()]
    elif by == "time":
        shared = None if group is None else group_given(group)
        costs = _times(model, sample, clock)
        if shared is not None:
            costs = shared.broadcast(np.array(costs), root=0).tolist()
    else:
        raise UsageError(f"cut by {by!r}", hint='use "parameters" or "time"')
    modules = list(model._modules.items())
    return [torch.nn.Sequential(OrderedDict(modules[start:stop])) for start, stop in pairwise(balanced(costs, pieces))]


def _check(model: Any, pieces: Any) -> None:
    if not isinstance(model, torch.nn.Sequential):
        shown = model.__name__ if isinstance(model, type) else type(model).__name__
        is_list = isinstance(model, list | tuple | torch.nn.ModuleList)
        hint = "torch.nn.Sequential(*modules) makes one" if is_list else "pass the model as a sequence of its parts"
        raise UsageError(f"model={shown} is no torch.nn.Sequential", hint=hint)
    if type(model).forward is not torch.nn.Sequential.forward:
        raise UsageError(
            f"{type(model).__name__} has a forward() of its own, which its pieces would lack",
            hint="make a torch.nn.Sequential of its parts, with modules for what forward() does besides",
        )
    if not isinstance(pieces, Integral):
        raise UsageError(f"pieces={pieces!r} is no whole number", hint="pass schedule.virtual_stages")


def _size(name: str, module: torch.nn.Module) -> float:
    """The number of elements of a module's parameters."""
    if any(map(is_lazy, module.parameters())):
        hint = 'run the model on a sample first, or cut by="time"'
        raise UsageError(f"module {name!r} has no shapes yet, so that its parameters cannot be counted", hint=hint)
    return float(sum(each.numel() for each in module.parameters()))


def balanced(costs: Sequence[float], pieces: int) -> list[int]:
    """The cut of a sequence that minimises the largest cost of a piece and, among those, the sum of squared costs.

    Returns:
        pieces + 1 indices, from 0 to len(costs); no piece is empty.
    """
    sums = [0.0, *accumulate(costs)]
    # best[stop]: (largest cost, sum of squares, cuts) for costs[:stop] in `count` pieces.
    best = {stop: (sums[stop], sums[stop] ** 2, [0, stop]) for stop in range(1, len(sums))}
    for count in range(2, pieces + 1):
        best = {
            stop: min(
                (max(heaviest, weight), squares + weight**2, [*cuts, stop])
                for start, (heaviest, squares, cuts) in best.items()
                if start < stop and (weight := sums[stop] - sums[start]) >= 0
            )
            for stop in range(count, len(sums))
        }
    return best[len(costs)][2]


def _times(model: torch.nn.Sequential, sample: Any, clock: Clock) -> list[float]:
    """Seconds of each module's forward and backward pass, measured on copies."""
    if sample is None:
        raise UsageError("time can be measured on a sample only", hint=_SAMPLE)
    if not all(isinstance(each, torch.Tensor | None) for each in tree_leaves(sample)):
        raise UsageError(f"the sample is a {type(sample).__name__}", hint=f"{_SAMPLE}, as a tensor or a tuple of tensors")
    x = tree_map_only(torch.Tensor, lambda each: each.detach().clone(), sample)
    times = []
    with torch.random.fork_rng():
        for name, module in model._modules.items():
            copied = _copy(name, module)
            times.append(min(_once(copied, x, clock) for _ in range(REPETITIONS)))
            with torch.no_grad():
                x = copied(x)
    return times


def _copy(name: str, module: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError) as problem:
        message = f"module {name!r} cannot be copied, to be timed: {problem}"
        raise UsageError(message, hint='cut by="parameters"') from problem


def _once(module: torch.nn.Module, x: Any, clock: Clock) -> float:
    copied = tree_map_only(torch.Tensor, _non_leaf, x)
    start = _now(x, clock)
    outputs = [each for each in tree_leaves(module(copied)) if isinstance(each, torch.Tensor) and each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return _now(x, clock) - start


def _non_leaf(x: torch.Tensor) -> torch.Tensor:
    """A copy, which modules may write to, unlike to a leaf."""
    return x.detach().requires_grad_(x.is_floating_point()).clone()


def _now(x: Any, clock: Clock) -> float:
    for each in tree_leaves(x):
        if isinstance(each, torch.Tensor) and each.is_cuda:
            torch.cuda.synchronize(each.device)
    return clock.now()
