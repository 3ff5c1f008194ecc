"""What torch's own optimizer remembers of parameters, cut into the shards that ranks remember, and back.

Of a parameter it remembers tensors of the parameter's shape, such as a mean of squares, and what is of it as a whole, such as
the number of steps. A shard has pieces of several parameters: the first are those pieces, joined and flat; of the second there
is one for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ferrorpc.ddp.shards import Shard
from ferrorpc.errors import UsageError


def is_piece(value: Any) -> bool:
    """Whether an optimizer remembers it of each element of a shard, and not of the whole, such as how many steps were made."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def apart(shard: Shard, state: Mapping[str, Any], root: int) -> dict[str, dict[str, Any]]:
    """The reverse of `joined`, by parameter: complete on rank `root`. Collective."""
    found: dict[str, dict[str, Any]] = {name: {} for name in shard.shapes}
    for key, value in state.items():
        pieces = shard.whole(value, root) if is_piece(value) else {name: _copied(value) for name in shard.shapes}
        for name, piece in pieces.items():
            found[name][key] = piece
    return found


def piece_keys(states: Iterable[Mapping[str, Any]]) -> set[str]:
    """What torch's own optimizer remembers of each element. Where all parameters are numbers their shapes do not tell."""
    tensors = [(key, value) for state in states for key, value in state.items() if isinstance(value, torch.Tensor)]
    return {key for key, value in tensors if is_piece(value)} or {key for key, _ in tensors if key != "step"}


def joined(shard: Shard, states: Mapping[str, dict[str, Any]], pieces: set[str]) -> dict[str, Any]:
    """What this rank's optimizer is to remember of a shard, from what torch's own remembers of each parameter in it."""
    held: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        for name, state in states.items():
            if key not in state:
                hint = "here all parameters are updated in every step: go on with torch's own until each has had a gradient"
                raise UsageError(f"the state has no {key} for {name}", hint=hint)
        values = {name: state[key] for name, state in states.items()}
        of_elements = key in pieces and all(isinstance(value, torch.Tensor) for value in values.values())
        held[key] = _cut_piece(shard, key, values) if of_elements else _shared(key, values)
    return held


def _cut_piece(shard: Shard, key: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for name, shape in shard.shapes.items():
        if values[name].shape != shape:
            raise UsageError(
                f"{key} has shape {tuple(values[name].shape)} for {name}, whose own is {shape}",
                hint="give this optimizer the same parameters in the same order",
            )
    piece = torch.zeros(len(shard.weights), dtype=next(iter(values.values())).dtype)
    shard.cut(values, piece)
    return piece


def _shared(key: str, values: Mapping[str, Any]) -> Any:
    """What is the same for all parameters of a shard."""
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
