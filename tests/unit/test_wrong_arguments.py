"""What is passed for an argument of training's faces and cannot be one is refused where it is passed, with what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc import DistributedDataParallel, GradientSynchronizer, Parameter, Pipeline, UsageError, ZeroOptimizer
from ferrorpc.ddp import hooks, rules
from ferrorpc.pipeline import schedules
from ferrorpc.testing import run_world


class Model:
    def __init__(self) -> None:
        self.weight = Parameter(np.zeros(3))

    def parameters(self) -> list[Parameter]:
        return [self.weight]

    def named_parameters(self) -> Any:
        return [("weight", self.weight)]

    def forward(self, x: np.ndarray) -> np.ndarray:
        return x * self.weight.data

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Unnamed(Model):
    def named_parameters(self) -> Any:
        return [self.weight]


class Listed(Model):
    named_parameters = ()  # type: ignore[assignment]


class Stage:
    def forward(self, x: Any) -> tuple[Any, None]:
        return x, None

    def backward(self, context: None, grad_y: Any) -> Any:
        return grad_y


WEIGHTS = {"a": np.zeros(3)}
RULE = rules.SGD(0.1)


def weigh_a_part(group: ferrorpc.ProcessGroup) -> None:
    ddp = DistributedDataParallel(Model(), group)
    for part in ddp.accumulate(2):
        ddp.sync_gradients(weight=3 + part)


WRONG: dict[str, tuple[Callable[[ferrorpc.ProcessGroup], object], str]] = {
    "ddp: a class": (lambda g: DistributedDataParallel(Model, g), r"module=Model is a class\ntry: .*Model\(\.\.\.\)"),
    "ddp: parameters without names": (lambda g: DistributedDataParallel(Unnamed(), g), r"gave a Parameter\ntry: .*\(name, "),
    "ddp: names that are no method": (lambda g: DistributedDataParallel(Listed(), g), "has no named_parameters"),
    "ddp: the arguments swapped": (lambda g: DistributedDataParallel(g, Model()), "is no ProcessGroup"),
    "ddp: bucket_cap_mb is endless": (lambda g: DistributedDataParallel(Model(), g, float("inf")), "bucket_cap_mb=inf"),
    "ddp: bucket_cap_mb is a flag": (lambda g: DistributedDataParallel(Model(), g, True), "bucket_cap_mb=True"),
    "ddp: bucket_cap_mb is beyond floats": (lambda g: DistributedDataParallel(Model(), g, 10**400), "bucket_cap_mb=1000"),
    "ddp: bucket_cap_mb is beyond bytes": (lambda g: DistributedDataParallel(Model(), g, 1e308), r"bucket_cap_mb=1e\+308"),
    "ddp: the weight of a part": (weigh_a_part, r"weight 3.*is not averaged.*\ntry: .*together, with the last one, and"),
    "ddp: check_every is text": (lambda g: DistributedDataParallel(Model(), g, check_every="x"), "check_every='x'"),
    "ddp: check_every is None": (lambda g: DistributedDataParallel(Model(), g, check_every=None), "check_every=None"),
    "ddp: check_every is a half": (lambda g: DistributedDataParallel(Model(), g, check_every=0.5), "check_every=0.5"),
    "ddp: a wrapped module": (
        lambda g: DistributedDataParallel(DistributedDataParallel(Model(), g), g),
        r"wrapped already\ntry: .*ddp\.module",
    ),
    "sync: order is a number": (lambda g: GradientSynchronizer(WEIGHTS, g, order=3), r"order=3 .*\ntry: .*every name once"),
    "sync: order is text": (lambda g: GradientSynchronizer(WEIGHTS, g, order="a"), r"order='a' .*\ntry: .*every name once"),
    "sync: a weight beyond floats": (lambda g: GradientSynchronizer(WEIGHTS, g)(WEIGHTS, 10**400), "is no share"),
    "zero: a model": (lambda g: ZeroOptimizer(Model(), g, RULE), r"weights: Model is no array"),
    "zero: parameters": (lambda g: ZeroOptimizer({"a": Parameter(np.zeros(3))}, g, RULE), r"weights 'a': .*\ntry: .*\.data"),
    "zero: swapped": (lambda g: ZeroOptimizer(WEIGHTS, RULE, g), "is no ProcessGroup"),
    "rule: a rate in words": (lambda _: rules.SGD("0.1"), r"rate='0\.1' is no number\ntry: "),
    "rule: no rate": (lambda _: rules.Adam(None), r"rate=None is no number\ntry: "),
    "rule: a rate that is none": (lambda _: rules.SGD(float("nan")), "rate=nan is no number"),
    "rule: betas as a pair": (lambda _: rules.Adam(1e-3, (0.9, 0.999)), r"beta1=\(0\.9, 0\.999\) is no number"),
    "rule: a beta of 1": (lambda _: rules.Adam(1e-3, 0.9, 1.0), r"beta2=1\.0 .*\ntry: .*below 1"),
    "pipeline: a class": (lambda g: Pipeline(Stage, g), r"stage 0 is the class Stage\ntry: .*Stage\(\.\.\.\)"),
    "pipeline: the arguments swapped": (lambda g: Pipeline(g, Stage()), "is no ProcessGroup"),
    "pipeline: a cost beyond floats": (lambda _: schedules.gpipe(1, 1).simulate(10**400), "is no time"),
    "pipeline: a peak beyond floats": (lambda _: schedules.gpipe(1, 1).validate(peak=10**400), "is no number of activations"),
    "pipeline: a schedule that is no name": (lambda _: schedules.named(None, 1, 1), "there is no schedule None"),
    "hooks: a rank in words": (lambda _: hooks.PowerSGD("2"), r"rank='2' is not 1 to 4"),
    "subgroup: a rank": (lambda g: g.subgroup(0), r"ranks=0 is no list of ranks\ntry: "),
    "subgroup: a rank, as an array": (lambda g: g.subgroup(np.array(0)), r"ranks=array\(0\) is no list of ranks\ntry: "),
    "store: a number to wait for": (lambda g: g.store.wait(np.array(0)), r"array\(0\) is no list of keys\ntry: "),
    "a timeout beyond floats": (lambda g: g.barrier(timeout=10**400), "is no number of seconds"),
    "pipeline: edges is a number": (lambda g: Pipeline(Stage(), g, edges=3), r"edges=3 .*\ntry: .*\[\(0, 1\)"),
    "pipeline: an edge of one end": (lambda g: Pipeline(Stage(), g, edges=[(0,)]), r"\(0,\) is no edge"),
    "pipeline: edges by letters": (lambda g: Pipeline(Stage(), g, edges=["ab"]), "'ab' is no edge"),
    "pipeline: an edge to a name": (lambda g: Pipeline(Stage(), g, edges=[(0, "x")]), r"\(0, 'x'\) is no edge"),
    "pipeline: tied is a number": (lambda g: Pipeline(Stage(), g, tied=3), r"tied=3 .*\ntry: .*\[\(\"0/"),
    "pipeline: a tie of a number": (lambda g: Pipeline(Stage(), g, tied=[3]), "tied="),
    "pipeline: a tie to a number": (lambda g: Pipeline(Stage(), g, tied=[("0/a", 3)]), "tied="),
    "pipeline: chunks of zbv": (lambda g: Pipeline(Stage(), g, "zbv"), r"zbv with 1 stage a rank.*\ntry: .*list of 2 stages"),
    "pipeline: chunks of 1f1b": (lambda g: Pipeline([Stage()] * 3, g), r"1f1b with 3 .*\ntry: .*one stage.*looped_bfs"),
}

X = np.ones((2, 3))


def square(y: Any, target: Any) -> tuple[float, Any]:
    return float(np.square(y - target).sum()), 2 * (y - target)


def train(group: ferrorpc.ProcessGroup, x: Any = X, loss_fn: Any = square, **more: Any) -> object:
    return Pipeline(Stage(), group, "gpipe", 2).step(x, X, loss_fn, **more)


def rule_step(group: ferrorpc.ProcessGroup, state: Any) -> None:
    ZeroOptimizer({"a": np.zeros(2)}, group, RULE).load_state(state)


OVERLAPPING = np.zeros(6)
WRONG |= {
    "step: no loss_fn": (lambda g: train(g, loss_fn=None), r"needs loss_fn\ntry: loss_fn\(y, target\)"),
    "step: loss_fn is a number": (lambda g: train(g, loss_fn=3), r"loss_fn=3 is no function\ntry: loss_fn\(y, target\)"),
    "step: loss_fn is a class": (lambda g: train(g, loss_fn=Stage), r"loss_fn=.*Stage.* is no function\ntry: loss_fn\("),
    "within a step: a gradient in words": (
        lambda g: train(g, loss_fn=lambda y, t: (0.0, "x")),
        "gradient of y: str is no array",
    ),
    "within a step: a gradient of another shape": (
        lambda g: train(g, loss_fn=lambda y, t: (0.0, np.zeros(3))),
        r"loss_fn's gradient of y: has shape \(3,\), but y has \(1, 3\)\ntry: ",
    ),
    "within a step: two gradients for one y": (
        lambda g: train(g, loss_fn=lambda y, t: (0.0, (y, y))),
        r"loss_fn's gradient of y: gave a tuple of gradients, but y is one array\ntry: ",
    ),
    "step: weight is a number": (lambda g: train(g, weight=3), r"weight=3 is no function\ntry: "),
    "step: weights in words": (lambda g: train(g, weight=lambda t: "x"), r"weigh .*no share of a batch\ntry: "),
    "step: weights that are none": (lambda g: train(g, weight=lambda t: float("nan")), r"weigh .*no share of a batch\ntry: "),
    "step: on_gradients is a number": (lambda g: train(g, on_gradients=3), r"on_gradients=3 is no function\ntry: "),
    "step: too few microbatches": (lambda g: train(g, [X]), r"a list of 1 microbatches, .* 2\ntry: .*array"),
    "uneven: follow is a number": (
        lambda g: DistributedDataParallel(Model(), g).uneven(3).__enter__(),
        r"follow=3 is no function\ntry: .*optimizer\.step",
    ),
    "sync: follow is a number": (
        lambda g: GradientSynchronizer(WEIGHTS, g).uneven(3).__enter__(),
        r"follow=3 is no function\ntry: ",
    ),
    "zero: a state of nothing": (lambda g: rule_step(g, None), r"NoneType is no state\ntry: .*gather_state"),
    "zero: a state without steps": (lambda g: rule_step(g, {"rank": [0, 1]}), "the state is not this optimizer's: see 'step'"),
    "zero: whose state is that?": (lambda g: rule_step(g, {"rank": 3, "step": 1}), r"rank.*\ntry: "),
    "zero: weights that overlap": (
        lambda g: ZeroOptimizer({"a": OVERLAPPING[:4], "b": OVERLAPPING[3:]}, g, RULE),
        r"'a' and 'b' share memory.*\ntry: ",
    ),
    "zero: strided weights that overlap": (
        lambda g: ZeroOptimizer({"a": OVERLAPPING[::2], "b": OVERLAPPING[2::2]}, g, RULE),
        r"'a' and 'b' share memory.*\ntry: ",
    ),
    "zero: one weight, twice": (
        lambda g: ZeroOptimizer({"a": OVERLAPPING, "b": OVERLAPPING[:]}, g, RULE),
        r"'a' and 'b' share memory.*\ntry: ",
    ),
}


def check(make: Callable[[ferrorpc.ProcessGroup], object], said: str, ends_the_group: bool) -> None:
    """It is a UsageError that says what to pass. Where others may wait, within a step, it ends the group."""

    def body(group: ferrorpc.ProcessGroup) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            make(group)
        assert "see the docstring" not in str(caught.value)
        if not ends_the_group:
            group.barrier()

    run_world(1, body)


@pytest.mark.parametrize("case", WRONG)
def test_it_is_a_usage_error_that_says_what_to_pass(case: str) -> None:
    check(*WRONG[case], ends_the_group=case.startswith("within"))


TORCHS = {
    "device_ids": "to the device",
    "output_device": "to the device",
    "find_unused_parameters": "leave it out",
    "static_graph": "leave it out",
    "broadcast_buffers": 'buffers="local"',
    "process_group": "group=",
    "mixed_precision": "hooks.Compress",
}


@pytest.mark.parametrize("name", TORCHS)
def test_an_argument_of_torchs_wrapper_is_told_ferrorpcs_counterpart(name: str) -> None:
    def body(group: ferrorpc.ProcessGroup) -> None:
        with pytest.raises(UsageError) as caught:
            DistributedDataParallel(Model(), **{"group": group, name: None} if name != "process_group" else {name: group})
        assert name in caught.value.message
        assert TORCHS[name] in caught.value.hint

    run_world(1, body)


def test_weights_may_lie_between_each_other() -> None:
    def body(group: ferrorpc.ProcessGroup) -> None:
        both = np.zeros(6)
        optimizer = ZeroOptimizer({"a": both[::2], "b": both[1::2], "c": both[:0]}, group, rules.SGD(1.0, 0.0))
        optimizer.step({"a": np.ones(3), "b": np.full(3, 2.0), "c": None})
        assert both.tolist() == [-1, -2] * 3

    run_world(2, body)


def test_another_unknown_argument_is_pythons_affair() -> None:
    with pytest.raises(TypeError, match="bucket_cap"):
        run_world(1, lambda group: DistributedDataParallel(Model(), group, bucket_cap=3))  # type: ignore[call-arg]


def test_a_loss_alone_is_told_how_to_come_with_its_gradient() -> None:
    def body(group: ferrorpc.ProcessGroup) -> None:
        with pytest.raises(UsageError, match=r"loss_fn returned float64\ntry: .*ferrorpc\.torch\.with_gradient"):
            Pipeline(Stage(), group, "gpipe", 2).step(np.ones((2, 3)), np.ones((2, 3)), lambda y, t: np.sum(y - t))

    run_world(1, body)
