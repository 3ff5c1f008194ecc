"""Wrong arguments of ferrorpc.torch are refused where they are passed, with a hint what to pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import numpy as np
import pytest

import ferrorpc
from ferrorpc.errors import UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from ferrorpc.torch import DistributedDataParallel, Stage, ZeroOptimizer, cut, with_gradient  # noqa: E402
from tests.unit.test_wrong_arguments import Model, check  # noqa: E402


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def layers() -> nn.Sequential:
    return nn.Sequential(layer(), layer())


def weigh_a_part(group: ferrorpc.ProcessGroup) -> None:
    ddp = DistributedDataParallel(layer(), group)
    for part in ddp.accumulate(2):
        with ddp.weighted(3 + part):
            ddp(torch.ones(1, 2)).sum().backward()


SGD = torch.optim.SGD
WRONG: dict[str, tuple[Callable[[ferrorpc.ProcessGroup], object], str]] = {
    "ddp: a number": (lambda g: DistributedDataParallel(3, g), r"module=3 is no torch module\ntry: "),
    "ddp: no group": (lambda _: DistributedDataParallel(layer(), "x"), "group='x' is no ProcessGroup"),
    "ddp: a number and no group": (lambda _: DistributedDataParallel(3, "x"), "group='x' is no ProcessGroup"),
    "ddp: swapped": (lambda g: DistributedDataParallel(g, layer()), "is no ProcessGroup"),
    "ddp: a class": (lambda g: DistributedDataParallel(nn.Linear, g), r"is no torch module\ntry: .*an instance"),
    "ddp: a list": (lambda g: DistributedDataParallel([layer()], g), r"is no torch module\ntry: .*nn\.ModuleList"),
    "ddp: a NumPy model": (lambda g: DistributedDataParallel(Model(), g), "ferrorpc.DistributedDataParallel"),
    "ddp: the weight of a part": (
        weigh_a_part,
        r"weight 3.*is not averaged.*\ntry: .*together, by weighted\(\) around all parts, and",
    ),
    "ddp: check_every": (lambda g: DistributedDataParallel(layer(), g, check_every="x"), "check_every='x'"),
    "ddp: wrapped": (lambda g: DistributedDataParallel(DistributedDataParallel(layer(), g), g), "wrapped already"),
    "ddp: wrapped by NumPy's": (
        lambda g: DistributedDataParallel(ferrorpc.DistributedDataParallel(layer(), g), g),
        "wrapped already",
    ),
    "NumPy's ddp: wrapped": (
        lambda g: ferrorpc.DistributedDataParallel(DistributedDataParallel(layer(), g), g),
        "wrapped already",
    ),
    "ddp: a wrapped part": (
        lambda g: DistributedDataParallel(nn.Sequential(layer(), DistributedDataParallel(layer(), g)), g),
        "'1' of the module is wrapped already",
    ),
    "ddp: device_ids": (lambda g: DistributedDataParallel(layer(), g, device_ids=[0]), "device_ids"),
    "zero: an optimizer": (
        lambda g: ZeroOptimizer(layer().parameters(), SGD(layer().parameters(), lr=1), g),
        r"is an optimizer already\ntry: .*torch\.optim\.SGD, group, lr=",
    ),
    "zero: swapped": (lambda g: ZeroOptimizer(SGD, layer().parameters(), g), r"is no class of optimizer\ntry: .*parameters, "),
    "zero: group first": (lambda g: ZeroOptimizer(layer().parameters(), g, SGD), "is no class of optimizer"),
    "zero: a name": (lambda g: ZeroOptimizer(layer().parameters(), "adam", g), "optimizer='adam' is no class of optimizer"),
    "zero: a function": (lambda g: ZeroOptimizer(layer().parameters(), lambda p: SGD(p), g), "is no class of optimizer"),
    "zero: a module's class": (lambda g: ZeroOptimizer(layer().parameters(), nn.Linear, g), "is no class of optimizer"),
    "zero: no group": (lambda _: ZeroOptimizer(layer().parameters(), SGD, None), "is no ProcessGroup"),
    "zero: a module": (lambda g: ZeroOptimizer(layer(), SGD, g, lr=1), r"Linear.*\ntry: .*model\.parameters\(\)"),
    "zero: nothing": (lambda g: ZeroOptimizer([], SGD, g, lr=1), r"empty parameter list\ntry: .*model\.parameters\(\)"),
    "zero: None": (lambda g: ZeroOptimizer(None, SGD, g, lr=1), r"NoneType.*\ntry: .*model\.parameters\(\)"),
    "zero: NumPy's": (lambda g: ZeroOptimizer([np.zeros(3)], SGD, g, lr=1), r"ndarray\ntry: .*model\.parameters\(\)"),
    "zero: no leaf": (lambda g: ZeroOptimizer([layer().weight * 2], SGD, g, lr=1), "non-leaf"),
    "zero: an unknown option": (lambda g: ZeroOptimizer(layer().parameters(), SGD, g, rate=1), r"SGD: .*'rate'\ntry: "),
    "zero: a bad option": (lambda g: ZeroOptimizer(layer().parameters(), SGD, g, lr=-1), "SGD: Invalid learning rate"),
    "stage: a class": (lambda _: Stage(nn.Linear), r"is no torch module\ntry: .*an instance"),
    "stage: a number": (lambda _: Stage(3), "module=3 is no torch module"),
    "stage: a stage": (lambda _: Stage(Stage(layer())), "is no torch module"),
    "stage: a function": (lambda _: Stage(torch.relu), "is no torch module"),
    "loss: a number": (lambda _: with_gradient(3), r"criterion=3 is no function\ntry: "),
    "loss: a class": (lambda _: with_gradient(nn.MSELoss), r"MSELoss is a class\ntry: .*MSELoss\(\)"),
    "cut: a class": (lambda _: cut(nn.Linear, 2), r"is no torch\.nn\.Sequential\ntry: "),
    "cut: one layer": (lambda _: cut(layer(), 1), r"is no torch\.nn\.Sequential\ntry: "),
    "cut: a list": (lambda _: cut([layer()], 1), r"is no torch\.nn\.Sequential\ntry: .*Sequential\(\*"),
    "cut: a module list": (lambda _: cut(nn.ModuleList([layer()]), 1), r"is no torch\.nn\.Sequential\ntry: .*Sequential\(\*"),
    "cut: swapped": (lambda _: cut(2, layers()), r"is no torch\.nn\.Sequential"),
    "cut: pieces in words": (lambda _: cut(layers(), "2"), r"pieces='2' is no whole number"),
    "cut: a piece and a half": (lambda _: cut(layers(), 1.5), r"pieces=1\.5 is no whole number"),
    "cut: a sample of NumPy's": (lambda _: cut(layers(), 2, "time", sample=np.zeros((1, 2))), "the sample is a ndarray"),
    "cut: no group": (lambda _: cut(layers(), 2, "time", sample=torch.zeros(1, 2), group="x"), "is no ProcessGroup"),
}


def zero() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


def load(group: ferrorpc.ProcessGroup, state: object) -> None:
    ZeroOptimizer([zero()], SGD, group, lr=1).load_state_dict(state)


def step_with_sparse(group: ferrorpc.ProcessGroup) -> None:
    module = nn.Embedding(5, 3, sparse=True)
    optimizer = ZeroOptimizer(module.parameters(), SGD, group, lr=1)
    module(torch.tensor([1])).sum().backward()
    optimizer.step()


def lose(criterion: Callable[[torch.Tensor, torch.Tensor], object]) -> object:
    return with_gradient(criterion)(torch.ones(2, 3), torch.ones(2, 3))


def train(group: ferrorpc.ProcessGroup, loss_fn: object) -> object:
    return ferrorpc.Pipeline(Stage(layer()), group, "gpipe", 2).step(torch.ones(2, 2), torch.ones(2, 2), loss_fn)


def step_without_buffer(group: ferrorpc.ProcessGroup) -> None:
    module = layer()
    module.register_buffer("mask", torch.zeros(1))
    ddp = DistributedDataParallel(module, group)
    module.mask = None
    ddp(torch.ones(1, 2)).sum().backward()


ONE = zero()
WRONG |= {
    "ddp: a state in words": (
        lambda g: DistributedDataParallel(layer(), g).load_state_dict("model.pt"),
        r"str is no state\ntry: .*torch\.load",
    ),
    "ddp: a buffer that is gone": (step_without_buffer, "buffer 'mask': NoneType is no array"),
    "zero: no state": (lambda g: load(g, 3), r"int is no state\ntry: .*gather_state_dict"),
    "zero: an empty state": (lambda g: load(g, {}), r"has no 'state'(.|\n)*try: .*gather_state_dict"),
    "zero: whose state is that?": (lambda g: load(g, {"rank": 3, "state": {}, "param_groups": []}), r"rank.*\ntry: "),
    "zero: a state in words": (lambda g: load(g, {"state": "x", "param_groups": []}), "has no 'state'"),
    "zero: a parameter twice": (lambda g: ZeroOptimizer([ONE, ONE], SGD, g, lr=1), r"parameters 0 and 1 are one\ntry: "),
    "zero: a lazy parameter": (
        lambda g: ZeroOptimizer(nn.LazyLinear(2).parameters(), SGD, g, lr=1),
        r"parameter 0 is lazy.*\ntry: run the module",
    ),
    "zero: a closure that is none": (
        lambda g: ZeroOptimizer([zero()], SGD, g, lr=1).step(3),
        r"closure=3 is no function\ntry: .*step\(\)",
    ),
    "zero: a sparse gradient": (step_with_sparse, r"the gradient of 'parameter0': .*sparse"),
    "zero: copied": (lambda g: copy.deepcopy(ZeroOptimizer([zero()], SGD, g, lr=1)), r"copied or pickled\ntry: .*state_dict"),
    "loss: of each element": (lambda _: lose(lambda y, t: (y - t).square()), r"float32\[2,3\].*\ntry: .*reduction=\"mean\""),
    "loss: a number": (lambda _: lose(lambda y, t: (y - t).sum().item()), r"gave a float\ntry: .*without \.item"),
    "loss: of nothing": (lambda _: lose(lambda y, t: t.sum()), r"does not lead back to y\ntry: "),
    "within a step: a gradient of NumPy's": (
        lambda g: train(g, lambda y, t: (0.0, np.zeros((1, 2), np.float32))),
        r"gradient .*ndarray\ntry: .*with_gradient",
    ),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
@pytest.mark.parametrize("case", WRONG)
def test_it_is_a_usage_error_that_says_what_to_pass(case: str) -> None:
    check(*WRONG[case], ends_the_group=case.startswith("within"))


def test_every_argument_of_torchs_wrapper_is_taken_or_told_its_counterpart() -> None:
    own = inspect.signature(DistributedDataParallel.__init__).parameters
    refused = [name for name in inspect.signature(nn.parallel.DistributedDataParallel).parameters if name not in own]
    assert "device_ids" in refused

    def body(group: ferrorpc.ProcessGroup) -> None:
        for name in refused:
            with pytest.raises(UsageError, match=f"{name}= is an argument of torch's"):
                DistributedDataParallel(layer(), group=group, **{name: None})

    run_world(1, body)


def test_a_loss_of_torch_is_told_how_to_come_with_its_gradient() -> None:
    def body(group: ferrorpc.ProcessGroup) -> None:
        pipe = ferrorpc.Pipeline(Stage(layer()), group, "gpipe", 2)
        with pytest.raises(UsageError, match=r"loss_fn returned Tensor\ntry: .*ferrorpc\.torch\.with_gradient"):
            pipe.step(torch.ones(2, 2), torch.tensor([0, 1]), nn.functional.cross_entropy)

    run_world(1, body)
