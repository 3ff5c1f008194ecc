"""Regression tests for the defects of an earlier design of data parallelism."""

from __future__ import annotations

import random
import time

import numpy as np

from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.reducer import Reducer
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.types import DType, TensorSpec
from tests.unit.ddp.model import Plain
from tests.unit.ddp.world import run_world


def test_buckets_of_equal_size_in_flight_together_are_never_swapped():
    """Untagged messages of equal length could be confused; here every bucket has a number."""
    names = [f"p{index}" for index in range(8)]

    def body(group):
        sync = GradientSynchronizer({name: np.zeros(16) for name in names}, group, bucket_cap_mb=1e-4)
        shuffled = random.Random(group.rank)
        found = []
        for number in range(10):
            order = names.copy()
            shuffled.shuffle(order)
            with sync.step() as step:
                for name in order:
                    step.ready(name, np.full(16, 100.0 * number + int(name[1:])))
                    if shuffled.random() < 0.2:
                        time.sleep(0.001)
            found.append({name: set(array.tolist()) for name, array in step.grads.items()})
        return found

    for found in run_world(4, body):
        assert found == [{name: {100.0 * number + int(name[1:])} for name in names} for number in range(10)]


def test_broadcast_parameters_keeps_the_objects_that_optimizers_hold():
    """If parameters were replaced, an optimizer would keep the old ones, and ranks would diverge from the first step."""

    def body(group):
        module = Plain(w=np.full(3, float(group.rank)))
        held_parameter, held_array = module["w"], module["w"].data
        ddp = DistributedDataParallel(module, group, init_sync=False)
        ddp.broadcast_parameters(root=1)
        assert module["w"] is held_parameter
        held_array -= 0.5
        return module["w"].data.tolist()

    assert run_world(2, body) == [[0.5] * 3] * 2


def test_element_counts_need_not_divide_by_the_number_of_ranks():
    def body(group):
        reducer = Reducer([("w", TensorSpec(DType.FLOAT64, (100_003,)))], group, 25, "parameters")
        assert 100_003 % group.size
        sync = GradientSynchronizer({"w": np.zeros(100_003)}, group)
        result = sync({"w": np.arange(100_003.0) + group.rank})["w"]
        return len(reducer.layout.buckets), bool(np.array_equal(result, np.arange(100_003.0) + 1))

    assert run_world(3, body) == [(1, True)] * 3


def test_ranks_with_unequal_batches_get_the_mean_over_samples():
    """A mean of means would give samples of small batches more weight than others."""
    samples = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]

    def body(group):
        mine = samples[group.rank]
        sync = GradientSynchronizer({"g": np.zeros(())}, group)
        return float(sync({"g": mine.mean()}, weight=len(mine))["g"])

    assert run_world(2, body) == [np.concatenate(samples).mean()] * 2
