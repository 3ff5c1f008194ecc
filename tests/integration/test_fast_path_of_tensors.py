"""An all_reduce of torch tensors in shared memory takes the fast path, with the results of the general path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from tests.integration.test_fast_path import calls_taken, check_against_the_general_path, world

torch = pytest.importorskip("torch", reason="torch is not installed")
__all__ = ["world"]


def tensor(group: ProcessGroup) -> Any:
    return torch.arange(group.rank, group.rank + 10.0).reshape(5, 2)


def parts_of_one(length: int) -> tuple[Any, Any]:
    """Two tensors that share memory in part."""
    memory = torch.arange(length + 2.0)
    return memory[:length], memory[2:]


PLAIN: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "new": lambda x: (x, None),
    "into": lambda x: (x, torch.zeros(5, 2)),
    "in place": lambda x: (x, x),
    "integers": lambda x: (x.int(), None),
    "one number": lambda x: (x[1, 1], None),
}
"""Of a rank's tensor: what is given, and `out`."""
OTHERS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "into a view of it": lambda x: (x, x.view(5, 2)),
    "into an array": lambda x: (x, np.zeros((5, 2), np.float32)),
    "into a part of itself": lambda x: parts_of_one(8),
    "into another shape": lambda x: (x, torch.zeros(10)),
    "bfloat16": lambda x: (x.bfloat16(), None),
    "transposed": lambda x: (x.t(), None),
    "empty": lambda x: (x[:0], None),
    "conjugate": lambda x: ((x * 1j).conj(), None),
    "with a gradient": lambda x: (x.requires_grad_(), None),
    "sparse": lambda x: (x.to_sparse(), None),
}


def reduced(group: ProcessGroup, arrays: Callable[[Any], tuple[Any, Any]], options: dict[str, Any]) -> Any:
    """What can be compared of an all_reduce: values, whether `out` comes back and autograd knows that it was written."""
    x, out = arrays(tensor(group))
    result = group.all_reduce(x, out=out, **options)
    return type(result), str(result.dtype), result.tolist(), result is out, getattr(result, "_version", 0) > 0


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_what_comes_of_tensors_is_what_comes_of_them_in_the_general_way(world: list[ProcessGroup], name: str) -> None:
    arrays = {**PLAIN, **OTHERS}[name]
    check_against_the_general_path(world, lambda group, options: reduced(group, arrays, options))


def test_tensors_take_the_short_way(world: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = calls_taken(monkeypatch, "_all_reduce_shared")
    run_groups(world, lambda group: [reduced(group, arrays, {}) for arrays in PLAIN.values()])
    assert len(taken) == len(PLAIN) * len(world)
