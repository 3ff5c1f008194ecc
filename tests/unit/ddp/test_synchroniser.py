"""GradientSynchronizer, compared with one process: gradients ready in any order, with and without weights."""

from __future__ import annotations

import asyncio
import random
import threading
import tracemalloc
from contextlib import suppress
from functools import reduce
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.ddp.hooks import Compress, ErrorFeedback
from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.reduction import Reduction
from ferrorpc.ddp.replica import Replica
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import CollectiveMismatchError, GroupAbortedError, TensorMismatchError, UsageError
from ferrorpc.testing.reference import divided
from ferrorpc.types import DType, TensorSpec
from tests.unit.ddp.model import Plain
from tests.unit.ddp.world import run_world


class Layer(NamedTuple):
    weight: np.ndarray
    bias: np.ndarray


def tree(rank: int, dtype=np.float32):
    rng = np.random.default_rng(rank)

    def make(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape)).astype(dtype)

    return {"layers": [Layer(make(3, 4), make(4)), Layer(make(4, 2), make(2))], "scale": make()}


NAMES = ["layers/0/weight", "layers/0/bias", "layers/1/weight", "layers/1/bias", "scale"]


def leaves(value) -> list[np.ndarray]:
    (one, two), scale = value["layers"], value["scale"]
    return [one.weight, one.bias, two.weight, two.bias, scale]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_mean_has_the_bits_of_one_process_and_the_shape_of_the_tree(size):
    def body(group):
        sync = GradientSynchronizer(tree(0), group, bucket_cap_mb=5e-5)
        grads = tree(group.rank)
        kept = [leaf.copy() for leaf in leaves(grads)]
        result = sync(grads)
        assert all(np.array_equal(a, b) for a, b in zip(kept, leaves(grads), strict=True))
        return result

    for result in run_world(size, body):
        assert isinstance(result["layers"][0], Layer)
        for place, leaf in enumerate(leaves(result)):
            expected = reduce(np.add, [leaves(tree(rank))[place] for rank in range(size)]) / np.float32(size)
            assert leaf.tobytes() == np.asarray(expected).tobytes()
            assert leaf.flags.writeable
            assert leaf.flags.owndata


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_the_weighted_mean_has_the_bits_of_one_process(dtype):
    weights = [3, 0, 5.5]

    def body(group):
        return GradientSynchronizer(tree(0, dtype), group)(tree(group.rank, dtype), weight=weights[group.rank])

    real = np.zeros(1, dtype).real.dtype.type
    for result in run_world(3, body):
        for place, leaf in enumerate(leaves(result)):
            weighted = [leaves(tree(rank, dtype))[place] * real(weight) for rank, weight in enumerate(weights)]
            assert leaf.tobytes() == divided(np.asarray(reduce(np.add, weighted)), sum(weights)).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weighted_halves_are_rounded_once(dtype):
    """Weights of 60,000 tokens would overflow a float16 before the division."""

    def body(group):
        sync = GradientSynchronizer({"w": np.zeros(3, dtype)}, group)
        return sync({"w": np.full(3, group.rank + 1, dtype)}, weight=60_000 * (group.rank + 1))["w"]

    for result in run_world(2, body):
        assert result.dtype == dtype
        assert result.tobytes() == np.full(3, 5 / 3, np.float32).astype(dtype).tobytes()


def test_gradients_may_become_ready_in_different_orders_on_every_rank():
    def body(group):
        sync = GradientSynchronizer(tree(0), group, bucket_cap_mb=2e-5)
        results = []
        for number in range(5):
            named = dict(zip(NAMES, leaves(tree(10 * number + group.rank)), strict=True))
            order = list(named)
            random.Random(group.rank * 100 + number).shuffle(order)
            with sync.step() as step:
                for name in order:
                    step.ready(name, named[name])
            results.append(step.grads)
        return results

    for results in run_world(4, body):
        for number, result in enumerate(results):
            for place, leaf in enumerate(leaves(result)):
                total = reduce(np.add, [leaves(tree(10 * number + rank))[place] for rank in range(4)])
                assert leaf.tobytes() == np.asarray(total / np.float32(4)).tobytes()


def test_two_synchronisers_and_the_users_own_calls_do_not_mix():
    def body(group):
        one = GradientSynchronizer({"a": np.zeros(4)}, group)
        other = GradientSynchronizer({"a": np.zeros(4)}, group)
        first, second = one.step().__enter__(), other.step().__enter__()
        steps = [(first, 1.0), (second, 100.0)]
        if group.rank == 1:
            steps.reverse()
        for step, value in steps:
            step.ready("a", np.full(4, value))
        group.all_gather(np.zeros(1))
        for step, _ in steps:
            step.__exit__(None, None, None)
        return first.grads["a"][0], second.grads["a"][0]

    assert run_world(2, body) == [(1.0, 100.0)] * 2


def test_a_gradient_may_be_overwritten_as_soon_as_it_was_ready():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(4), "b": np.zeros(4)}, group)
        scratch = np.full(4, 1.0)
        with sync.step() as step:
            step.ready("a", scratch)
            scratch[:] = 2.0
            step.ready("b", scratch)
            scratch[:] = 3.0
        return step.grads["a"][0], step.grads["b"][0]

    assert run_world(2, body) == [(1.0, 2.0)] * 2


def test_like_may_hold_specs():
    def body(group):
        sync = GradientSynchronizer({"a": TensorSpec(DType.FLOAT32, (2,))}, group)
        return sync({"a": np.ones(2, np.float32)})["a"].tolist()

    assert run_world(2, body) == [[1.0, 1.0]] * 2


def test_names_are_checked():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(2)}, group)
        sent = len(group.calls)
        with pytest.raises(UsageError, match="missing: b; unknown: c"):
            sync({"a": np.zeros(2), "c": np.zeros(2)})
        with pytest.raises(TensorMismatchError, match="'b' is float32"):
            sync({"a": np.zeros(2), "b": np.zeros(2, np.float32)})
        for weight in (-1, "three", np.ones(2)):
            with pytest.raises(UsageError, match="no share"):
                sync({"a": np.zeros(2), "b": np.zeros(2)}, weight=weight)
        assert len(group.calls) == sent
        step = sync.step().__enter__()
        step.ready("a", np.zeros(2))
        with pytest.raises(UsageError, match="ready before"):
            step.ready("a", np.zeros(2))
        with pytest.raises(UsageError, match="no gradient 'x'"):
            step.ready("x", np.zeros(2))
        with pytest.raises(UsageError, match="not over"):
            _ = step.grads
        with pytest.raises(UsageError, match="still open"):
            sync.step().__enter__()
        step.__exit__(None, None, None)
        with pytest.raises(UsageError, match="not open"):
            step.ready("b", np.zeros(2))
        return sync({"a": np.ones(2), "b": np.ones(2)})["a"].tolist()

    assert run_world(1, body) == [[1.0, 1.0]]


def backward_that_fails(sync: GradientSynchronizer) -> None:
    with sync.step() as step:
        step.ready("a", np.full(2, 7.0))
        raise ZeroDivisionError


def test_a_rank_that_raises_in_its_backward_pass_tells_the_others_at_once():
    """Not their timeout after a minute."""

    def body(group):
        if group.rank == 1:
            sync = GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(2)}, group, bucket_cap_mb=1e-5)
            with pytest.raises(ZeroDivisionError):
                backward_that_fails(sync)
        with pytest.raises(GroupAbortedError, match="rank 1") as caught:
            GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(2)}, group, bucket_cap_mb=1e-5)({"a": np.ones(2), "b": None})
        return str(caught.value)

    for message in run_world(3, body):
        assert "ZeroDivisionError" in message


def test_a_hook_that_fails_on_one_rank_ends_the_generation():
    """The others wait for what the hook would have sent."""

    def body(group):
        hook = ErrorFeedback(Compress("bf16"))
        module = Plain(a=np.ones(2, np.float32))
        ddp = DistributedDataParallel(module, group, hook=hook)
        module["a"].grad = np.ones(2, np.float32)
        if group.rank == 1:
            hook.load_state({f"residue/{ddp._replica.reducer.keys[0]}": np.zeros(5, np.float32)})
            with pytest.raises(UsageError, match="residue"):
                ddp.sync_gradients()
        with pytest.raises(GroupAbortedError, match="rank 1") as caught:
            ddp.sync_gradients()
        return caught.value.cause

    assert ["has 5 values for 2" in cause for cause in run_world(2, body)] == [True, True]


def averaged_by_a_step(group):
    with GradientSynchronizer({"a": np.zeros(2)}, group).step() as step:
        step.ready("a", np.ones(2))


def averaged_by_a_module(group):
    DistributedDataParallel(Plain(a=np.ones(2)), group).sync_gradients()


def averaged_by_a_call(group):
    GradientSynchronizer({"a": np.zeros(2)}, group)({"a": np.ones(2)})


@pytest.mark.parametrize("error", [TimeoutError("time is up"), UsageError("no array", hint="pass one")])
@pytest.mark.parametrize(
    ("average", "where", "method"),
    [(averaged_by_a_step, GradientSynchronizer, "_means"), (averaged_by_a_module, Replica, "_store")],
)
def test_a_step_that_fails_on_one_rank_when_all_gradients_are_there_ends_the_generation(
    average, where, method, error, monkeypatch
):
    """As when a signal handler raises: the others take the step."""
    victims, original = [], getattr(where, method)

    def fails(*arguments):
        if threading.get_ident() in victims:
            raise error
        return original(*arguments)

    monkeypatch.setattr(where, method, fails)

    def body(group):
        if group.rank == 1:
            victims.append(threading.get_ident())
            with pytest.raises(type(error)):
                average(group)
        else:
            with suppress(GroupAbortedError):
                average(group)
        with pytest.raises(GroupAbortedError) as later:
            group.barrier()
        return later.value.rank

    assert run_world(2, body) == [1, 1]


@pytest.mark.parametrize("average", [averaged_by_a_call, averaged_by_a_module])
@pytest.mark.parametrize("method", ["__init__", "_wait_for_buckets"])
def test_an_interrupt_while_gradients_are_averaged_ends_the_generation(average, method, monkeypatch):
    """The others would take a step that the interrupted rank may not take."""

    original, victims = getattr(Reduction, method), []

    def interrupted(*arguments):
        found = original(*arguments)
        if threading.get_ident() in victims:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Reduction, method, interrupted)

    def body(group):
        if group.rank == 1:
            victims.append(threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                average(group)
        else:
            with suppress(GroupAbortedError):  # what it was sent may be enough for it
                average(group)
        with pytest.raises(GroupAbortedError) as later:
            group.barrier()
        return later.value.rank, later.value.cause

    assert run_world(2, body) == [(1, "KeyboardInterrupt")] * 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_an_interrupt_in_a_backward_pass_ends_the_generation(kind):
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        with suppress(GroupAbortedError):  # rank 1 may be out of it, and interrupted, before rank 0 is
            group.barrier()
        if group.rank == 1:
            with pytest.raises(kind), sync.step():
                raise kind
        with pytest.raises(GroupAbortedError) as later:
            sync({"a": np.ones(2)})
        return later.value.cause

    assert run_world(2, body) == [kind.__name__] * 2


def test_what_only_a_rank_of_weight_zero_has_counts_for_nothing():
    def body(group):
        sync = GradientSynchronizer({"w": np.zeros(2), "rare": np.zeros(2)}, group)
        means = sync({"w": np.full(2, 4.0), "rare": None if group.rank else np.full(2, np.nan)}, weight=group.rank)
        return means["w"].tolist(), means["rare"]

    assert run_world(2, body) == [([4.0, 4.0], None)] * 2


def test_weights_that_sum_to_zero_are_an_error_on_every_rank():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        with pytest.raises(UsageError, match="sum to zero"):
            sync({"a": np.ones(2)}, weight=0)
        return sync({"a": np.ones(2)}, weight=group.rank)["a"].tolist()

    assert run_world(2, body) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
def test_a_weight_beyond_float32_is_an_error_of_ours_where_numpy_is_to_raise_its_own(dtype):
    def body(group):
        sync, grads = GradientSynchronizer({"a": np.zeros(2, dtype)}, group), {"a": np.ones(2, dtype)}
        with np.errstate(all="raise"), pytest.raises(UsageError, match="sum to inf"):
            sync(grads, weight=1e39)
        return sync(grads, weight=1)["a"].tolist()

    assert run_world(2, body) == [[1.0, 1.0]] * 2


def test_a_weight_on_one_rank_only_is_a_mismatch_on_every_rank():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        with pytest.raises(CollectiveMismatchError) as caught:
            sync({"a": np.ones(2)}, weight=3 if group.rank == 0 else None)
        return sorted(caught.value.signatures.values())

    for signatures in run_world(2, body):
        assert signatures == ["all_reduce(op=mean, float64[10])", "all_reduce(op=sum, float64[10])"]


def test_ranks_with_different_trees_learn_where_they_differ():
    def body(group):
        like = {"a": np.zeros(2)} | ({"b": np.zeros(3)} if group.rank == 1 else {})
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 has .*'b: float64\[3\]' where rank 0 has 'nothing'"):
            GradientSynchronizer(like, group)

    run_world(2, body)


def test_ranks_of_a_subgroup_that_differ_are_called_as_all_the_world_calls_them():
    def body(group):
        part = group.subgroup([1, 2])
        if part is not None:
            like = {str(number): np.zeros(2) for number in range(5 * part.rank)}
            with pytest.raises(CollectiveMismatchError, match=r"rank 2 has .* where rank 1 has 'nothing', 3 more") as caught:
                GradientSynchronizer(like, part)
            assert caught.value.fields["signatures"].keys() == {1, 2}

    run_world(3, body)


def test_a_gradient_that_is_none_counts_as_zeros_and_not_as_what_the_round_before_left_in_its_place():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}, group)
        sync({name: np.full(2, 8.0) for name in "abc"})
        with sync.step() as step:
            step.ready("a", None)
            step.ready("b", np.full(2, 4.0) if group.rank else None)
            step.add("c", np.full(2, 1.0))
            step.ready("c", None)
        return step.grads["a"], step.grads["b"].tolist(), step.grads["c"].tolist()

    assert run_world(2, body) == [(None, [2.0, 2.0], [1.0, 1.0])] * 2


def test_means_belong_to_the_caller_unless_views_were_asked_for():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        first = sync({"a": np.ones(2)})["a"]
        sync({"a": np.zeros(2)})
        return first.tolist(), first.flags.owndata

    assert run_world(2, body) == [([1.0, 1.0], True)] * 2


@pytest.mark.parametrize("dtype", ["float32", np.float32, "f4", np.dtype("float32"), DType.FLOAT32])
def test_a_specs_dtype_may_be_given_as_dtypes_are_everywhere(dtype):
    def body(group):
        sync = GradientSynchronizer({"w": TensorSpec(dtype, [3])}, group)
        return sync({"w": np.full(3, group.rank, np.float32)})["w"].tolist()

    assert run_world(2, body) == [[0.5, 0.5, 0.5]] * 2


def test_a_spec_of_a_dtype_that_is_none_is_refused_by_its_name():
    def body(group):
        with pytest.raises(TensorMismatchError, match=r"^gradient 'w': dtype float8 is not supported"):
            GradientSynchronizer({"w": TensorSpec("float8", (3,))}, group)
        with pytest.raises(UsageError, match=r"^gradient 'w': shape=\(-3,\) is no shape"):
            GradientSynchronizer({"w": TensorSpec("float32", (-3,))}, group)

    run_world(1, body)


class Outline:
    """As jax.ShapeDtypeStruct: a shape and a dtype, and no elements."""

    def __init__(self, shape: tuple[int, ...], dtype: object) -> None:
        self.shape = shape
        self.dtype = dtype


def test_anything_with_a_shape_and_a_dtype_is_a_spec():
    def body(group):
        sync = GradientSynchronizer({"w": Outline((3,), np.dtype("float32")), "b": Outline((), "float64")}, group)
        means = sync({"w": np.full(3, group.rank, np.float32), "b": np.float64(group.rank)})
        assert (means["w"] == 0.5).all()
        assert means["b"] == 0.5
        with pytest.raises(TensorMismatchError):
            sync({"w": np.zeros(4, np.float32), "b": 0.0})
        with pytest.raises(TensorMismatchError, match="complex128"):
            GradientSynchronizer({"w": Outline((3,), "U7")}, group)

    run_world(2, body)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_mean_is_copied_out_of_its_bucket_once(dtype):
    def body(group):
        grads = {"a": np.ones((512, 1024), dtype)}
        sync = GradientSynchronizer(grads, group)
        sync(grads)
        tracemalloc.start()
        try:
            mean = sync(grads)["a"]
            return tracemalloc.get_traced_memory()[1] / mean.nbytes
        finally:
            tracemalloc.stop()

    assert run_world(1, body)[0] < 1.5
