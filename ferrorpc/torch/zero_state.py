"""Converts the state of torch's own optimizer to the state of this rank's shards, and back.

The state of a parameter consists of tensors of the parameter's shape, such as a mean of squares, and of values for the whole
parameter, such as the number of steps. A shard contains pieces of several parameters. Its state has one flat tensor of these
pieces for each of the former, and one common value for each of the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Final

import torch

from ferrorpc.ddp.shards import Shard
from ferrorpc.errors import UsageError

_PER_PARAMETER: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""The tensors that torch's optimizers keep once for a whole parameter: all of them its steps, NAdam and ASGD the others."""


def is_per_element(value: Any) -> bool:
    """Whether a value in an optimizer's state has an element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def unshard_state(shard: Shard, state: Mapping[str, Any], root: int) -> dict[str, dict[str, Any]]:
    """The reverse of `shard_state`, by parameter: complete on rank `root`. Collective."""
    found: dict[str, dict[str, Any]] = {name: {} for name in shard.shapes}
    for key, value in state.items():
        pieces = shard.assemble(value, root) if is_per_element(value) else {name: _copied(value) for name in shard.shapes}
        for name, piece in pieces.items():
            found[name][key] = piece
    return found


def per_element_keys(states: Iterable[Mapping[str, Any]]) -> set[str]:
    """The keys of per-element tensors in a state. If all parameters are scalars, shapes do not tell, but names do."""
    tensors = [(key, value) for state in states for key, value in state.items() if isinstance(value, torch.Tensor)]
    return {key for key, value in tensors if is_per_element(value)} or {key for key, _ in tensors} - _PER_PARAMETER


def shard_state(shard: Shard, states: Mapping[str, dict[str, Any]], per_element: set[str]) -> dict[str, Any]:
    """The state of this rank's shard, from that of each parameter in it."""
    sharded: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        for name, state in states.items():
            if key not in state:
                hint = "here all parameters are updated in every step: go on with torch's own until each has had a gradient"
                raise UsageError(f"the state has no {key} for {name}", hint=hint)
        values = {name: state[key] for name, state in states.items()}
        is_sharded = key in per_element and all(isinstance(value, torch.Tensor) for value in values.values())
        sharded[key] = _shard_tensor(shard, key, values) if is_sharded else _common(key, values)
    return sharded


def _shard_tensor(shard: Shard, key: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for name, shape in shard.shapes.items():
        if values[name].shape != shape:
            raise UsageError(
                f"{key} has shape {tuple(values[name].shape)} for {name}, whose own is {shape}",
                hint="give this optimizer the same parameters in the same order",
            )
    dtype = reduce(torch.promote_types, (value.dtype for value in values.values()))
    piece = torch.zeros(len(shard.weights), dtype=dtype, device="cpu")
    shard.extract({name: value.to(dtype) for name, value in values.items()}, piece)
    return piece


def _common(key: str, values: Mapping[str, Any]) -> Any:
    """A value that must be the same for all parameters of a shard."""
    (first, one), *others = values.items()
    for name, other in others:
        if other != one:
            raise UsageError(
                f"{key} is {one} for {first} and {other} for {name}, but here they travel and are updated together",
                hint="a smaller bucket_cap_mb puts them into messages of their own",
            )
    return _copied(one)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
