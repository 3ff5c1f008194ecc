"""What a hook remembers of a bucket belongs to the gradients in it: other gradients begin with nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import ferrorpc
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.hooks import Compress, ErrorFeedback, PowerSGD, TopK
from ferrorpc.testing import run_world
from ferrorpc.types import DType, TensorSpec

SQUARE = np.ones((16, 16), np.float32)
HOOKS = {
    "top quarter": lambda: ErrorFeedback(TopK(0.25)),
    "power": lambda: ErrorFeedback(PowerSGD(1)),
    "feedback of factors": lambda: PowerSGD(1, ErrorFeedback(Compress("int8"))),
}
hooks = pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)


def gradient(scale: float) -> np.ndarray:
    return scale * np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)


def mean(group, hook, name: str, scale: float) -> np.ndarray:
    return ferrorpc.GradientSynchronizer({name: SQUARE}, group, hook=hook)({name: gradient(scale)})[name]


def begun_anew(hook, make):
    return hook


def begun_with_its_state(hook, make):
    """As a job that goes on from a checkpoint."""
    again = make()
    again.load_state(hook.state())
    return again


@hooks
@pytest.mark.parametrize("go_on", [begun_anew, begun_with_its_state])
def test_another_gradient_of_the_same_size_gets_nothing_of_the_one_before(make, go_on):
    """As where a module is wrapped again after another layer was unfrozen."""

    def body(group):
        hook = make()
        mean(group, hook, "last", 1000)
        return mean(group, go_on(hook, make), "first", 1e-3), mean(group, make(), "first", 1e-3)

    for found, wanted in run_world(2, body):
        assert found.tolist() == wanted.tolist()


@hooks
@pytest.mark.parametrize("go_on", [begun_anew, begun_with_its_state])
def test_the_same_gradients_go_on_with_what_was_remembered(make, go_on):
    def body(group):
        hook, same = make(), make()
        sync = ferrorpc.GradientSynchronizer({"a": SQUARE}, group, hook=same)
        for _ in range(2):
            wanted = sync({"a": gradient(1)})["a"]
        mean(group, hook, "a", 1)
        return mean(group, go_on(hook, make), "a", 1), wanted

    for found, wanted in run_world(2, body):
        assert found.tolist() == wanted.tolist()


@hooks
def test_what_belongs_to_other_gradients_is_forgotten(make):
    def body(group):
        hook = make()
        mean(group, hook, "a", 1)
        before = hook.state()
        mean(group, hook, "b", 1)
        after = hook.state()
        hook.load_state(before)
        kept = hook.state()
        other = copy.copy(hook)
        other.load_state(before)
        return set(before), set(after), set(kept), set(other.state())

    for before, after, kept, copied in run_world(2, body):
        assert len(before) == len(after)
        assert not before & after
        assert not kept, "a state of other gradients"
        assert copied == before, "a copy serves no gradients yet"


def test_the_key_of_a_bucket_names_the_gradients_in_it():
    def key(dtype=DType.FLOAT32, **shapes: tuple[int, ...]) -> str:
        (bucket,) = lay_out([(name, TensorSpec(dtype, shape)) for name, shape in shapes.items()], 1 << 20).buckets
        return bucket.key

    others = [
        key(b=(4, 4)),
        key(a=(2, 8)),
        key(DType.BFLOAT16, a=(4, 4)),
        key(a=(4, 4), b=(4, 4)),
        key(b=(4, 4), a=(4, 4)),
    ]
    assert key(a=(4, 4)) == key(a=(4, 4))
    assert len({key(a=(4, 4)), *others}) == 6


def test_a_bucket_keeps_its_key_beside_other_buckets():
    specs = {name: TensorSpec(DType.FLOAT32, (4, 4)) for name in "abc"}
    alone, more = (lay_out([(name, specs[name]) for name in names], 1).buckets for names in ("ab", "abc"))
    assert {bucket.key for bucket in alone} < {bucket.key for bucket in more}
