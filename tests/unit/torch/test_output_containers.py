"""Outputs in containers that torch does not know as such."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from ferrorpc.torch import DistributedDataParallel  # noqa: E402


class Named(dict):
    """As EasyDict and Box."""


class Listed(list): ...


class Pair(tuple): ...


@dataclass
class Around:
    inner: Any


@dataclass
class Both(dict):
    """As those of some libraries, which give their fields by name, too."""

    y: Any


class Computing(Mapping):
    """What it is asked for costs much, or cannot be had yet."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("loss",))

    def __len__(self) -> int:
        return 1


def in_itself(y: torch.Tensor) -> Named:
    found = Named()
    found["self"] = found
    return Named(found, y=Listed([found, y]))


CONTAINERS = {
    "dict": lambda y: Named(y=y),
    "mapping": lambda y: UserDict(y=y),
    "list": lambda y: Listed([None, y]),
    "tuple": lambda y: Pair([3, y]),
    "nested": lambda y: [Around(Named(y=Pair([UserDict(y=y)])))],
    "in itself": in_itself,
    "dict and dataclass": Both,
    "beside what computes": lambda y: (Computing(), y),
}


@pytest.mark.parametrize("contained", CONTAINERS.values(), ids=CONTAINERS)
def test_a_rank_that_uses_no_parameter_takes_part_in_the_step(contained) -> None:
    class Skipped(torch.nn.Linear):
        def forward(self, x, is_skipped):
            self.y = x.sum() if is_skipped else super().forward(x)
            return contained(self.y)

    def body(group):
        ddp = DistributedDataParallel(Skipped(2, 1, bias=False), group)
        found = []
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 2), 1.0 + step, requires_grad=True), step == 0 and group.rank == 1)
            ddp.module.y.sum().backward()
            found.append(ddp.module.weight.grad.flatten().tolist())
        return found

    assert run_world(2, body) == [[[0.5, 0.5], [2.0, 2.0], [3.0, 3.0]]] * 2
