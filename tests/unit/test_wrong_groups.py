"""What is passed as a group and is none is refused where it is passed, before anything else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc import Parameter, UsageError
from ferrorpc.testing import run_world


class Model:
    def __init__(self) -> None:
        self.weight = Parameter(np.zeros(3))

    def parameters(self) -> list[Parameter]:
        return [self.weight]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return [("weight", self.weight)]

    def forward(self, x: np.ndarray) -> np.ndarray:
        return x * self.weight.data


MAKERS: dict[str, Callable[[Any], object]] = {
    "DistributedDataParallel": lambda group: ferrorpc.DistributedDataParallel(Model(), group),
    "GradientSynchronizer": lambda group: ferrorpc.GradientSynchronizer({"weight": np.zeros(3)}, group),
    "ZeroOptimizer": lambda group: ferrorpc.ZeroOptimizer({"weight": np.zeros(3)}, group, ferrorpc.rules.SGD(0.1)),
    "Pipeline": lambda group: ferrorpc.Pipeline(Model(), group),
    "Mesh": lambda group: ferrorpc.Mesh({"dp": 1}, group),
}


@pytest.mark.parametrize("wrong", [None, "group", 2, ferrorpc.SimulatedBackend], ids=repr)
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_no_group_is_refused(maker: str, wrong: object) -> None:
    with pytest.raises(UsageError, match=r"is no ProcessGroup(.|\n)*subgroup\(\) returns None"):
        MAKERS[maker](wrong)


def test_the_none_of_a_rank_outside_a_subgroup_is_told_as_such() -> None:
    def body(group: ferrorpc.ProcessGroup) -> None:
        part = group.subgroup([0])
        if part is None:
            with pytest.raises(UsageError, match="on the ranks outside"):
                ferrorpc.GradientSynchronizer({"weight": np.zeros(3)}, part)
        group.barrier()

    run_world(2, body)


class Bare(ferrorpc.Backend):
    """Sets nothing."""

    def send(self, data: Any, dst: int, tag: int = 0) -> None: ...

    def recv(self, src: int, tag: int = 0, out: Any = None, timeout: float | None = None) -> Any: ...

    def barrier(self, timeout: float | None = None) -> None: ...


def test_a_group_of_what_is_no_backend_is_told_what_is_missing() -> None:
    with pytest.raises(UsageError, match=r"backend=3 is no backend(.|\n)*init_process_group"):
        ferrorpc.ProcessGroup(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"backend Bare has rank None and size None(.|\n)*set self.rank and self.size"):
        ferrorpc.ProcessGroup(Bare())


def test_memory_is_given_only_for_what_can_be_sent_and_while_the_group_is_open() -> None:
    def body(group: ferrorpc.ProcessGroup) -> None:
        assert group.empty([1] * 32).ndim == 32
        with pytest.raises(UsageError, match="33 dimensions"):
            group.empty([1] * 33)
        group.close()
        with pytest.raises(ferrorpc.GroupClosedError):
            group.empty(3)

    run_world(2, body)
