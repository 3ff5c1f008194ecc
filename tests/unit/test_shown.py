"""What objects of the face show of themselves, and that those which belong to a process are not copied out of it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc import ProcessGroup, UsageError
from ferrorpc.testing import run_world


class Model:
    def __init__(self) -> None:
        self.weight = ferrorpc.Parameter(np.zeros(3))

    def parameters(self) -> list[ferrorpc.Parameter]:
        return [self.weight]

    def named_parameters(self) -> list[tuple[str, ferrorpc.Parameter]]:
        return [("weight", self.weight)]


class Stage:
    def forward(self, x: Any) -> tuple[Any, None]:
        return x, None

    def backward(self, context: None, grad_y: Any) -> Any:
        return grad_y


def finished(group: ProcessGroup) -> ferrorpc.Work[Any]:
    work = group.all_reduce(1.0, async_op=True)
    work.wait()
    return work


MADE: dict[str, tuple[Callable[[ProcessGroup], Any], str]] = {
    "group": (lambda group: group, "<ProcessGroup simulated rank 0 of 1, generation 1: open>"),
    "work": (finished, "<Work all_reduce(op=sum, float64[]) #1: done>"),
    "store": (lambda group: group.store, "<LocalStore: small values shared by the job>"),
    "session": (lambda group: group.session, "<LocalSession rank 0 of 1, generation 1>"),
    "backend": (lambda _: ferrorpc.SimulatedBackend.create_group(1)[0], "<SimulatedBackend rank 0 of 1>"),
    "mesh": (lambda group: ferrorpc.Mesh({"dp": 1}, group), "<Mesh dp 1, rank 0 at {'dp': 0}>"),
    "steps": (
        lambda group: ferrorpc.DistributedDataParallel(Model(), group).steps,
        "<Steps of rank 0 of 1: 0 kept, none after the first>",
    ),
    "optimizer": (
        lambda group: ferrorpc.ZeroOptimizer({"a": np.zeros(2), "b": np.zeros(1)}, group, ferrorpc.rules.SGD(0.1)),
        "<ZeroOptimizer of 2 weights by SGD(rate=0.1, momentum=0.9, decay=0.0), rank 0 of 1, step 0>",
    ),
    "pipeline": (
        lambda group: ferrorpc.Pipeline(Stage(), group, "gpipe", 2),
        "<Pipeline gpipe: 1 stages, 2 microbatches, rank 0 with stage 0>",
    ),
    "synchroniser": (
        lambda group: ferrorpc.GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(1)}, group),
        "<GradientSynchronizer of 2 gradients, rank 0 of 1>",
    ),
    "module": (
        lambda group: ferrorpc.DistributedDataParallel(Model(), group),
        "<DistributedDataParallel of Model, 1 parameters that train, rank 0 of 1>",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_it_says_what_it_is(name: str) -> None:
    make, shown = MADE[name]
    assert run_world(1, lambda group: repr(make(group))) == [shown]


def test_hooks_say_what_they_do() -> None:
    assert repr(ferrorpc.hooks.Compress("bf16")) == "<Compress: bf16>"
    assert repr(ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.PowerSGD(2))).startswith("<ErrorFeedback: error feedback(power sgd")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", [name for name in MADE if name not in ("mesh", "steps")])
def test_it_is_not_copied_and_says_what_to_do_instead(name: str, way: Callable[[Any], Any]) -> None:
    """A synchroniser can be copied no deeper than to its group."""

    def body(group: ProcessGroup) -> None:
        thing = MADE[name][0](group)
        if name in ("synchroniser", "optimizer", "pipeline") and way is copy.copy:
            return
        with pytest.raises(UsageError, match=r"cannot be copied or pickled\ntry: "):
            way(thing)

    run_world(1, body)
