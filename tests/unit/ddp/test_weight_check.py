"""Ranks whose weights differ are detected and named."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.coordination import local_exchange
from ferrorpc.ddp import weight_check
from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import BarrierTimeoutError, CollectiveMismatchError, UsageError
from ferrorpc.testing import run_world
from tests.unit.ddp.model import Plain

X = np.zeros(2, np.float32)


@pytest.mark.parametrize("together_bytes", [1 << 20, 4 * 3 * weight_check.HASH_BYTES])
@pytest.mark.parametrize("count", [1, 5, 9, 96, 600])
def test_the_first_parameter_that_differs_is_named_however_many_there_are(count, together_bytes, monkeypatch):
    """With 8 hashes of each rank a barrier, or 3, as in a large world, so that several barriers are needed."""
    monkeypatch.setattr(weight_check, "GROUPS_MAX", 8)
    for module in (weight_check, local_exchange):
        monkeypatch.setattr(module, "BARRIER_BYTES_MAX", together_bytes)
    guilty = max(0, count - 2)

    def body(group):
        weights = {f"p{index}": np.full(2, index, np.float32) for index in range(count)}
        sync = GradientSynchronizer({}, group)
        sync.check_weights(weights)
        if group.rank == 2:
            for late in range(guilty, count):
                weights[f"p{late}"][1] += 1e-5 * (1 + late)
        with pytest.raises(CollectiveMismatchError, match=f"now: rank 2 differs from rank 0, first in 'p{guilty}'") as caught:
            sync.check_weights(weights)
        assert sorted(caught.value.signatures) == [0, 1, 2, 3]
        group.barrier()

    run_world(4, body)


def test_what_makes_weights_equal_again_is_what_the_caller_has():
    def body(group):
        sync = GradientSynchronizer({}, group)
        weights = {"w": np.full(2, group.rank, np.float32)}
        with pytest.raises(CollectiveMismatchError, match=r"\ntry: .*group\.broadcast\(weight, out=weight\)") as caught:
            sync.check_weights(weights)
        assert "broadcast_parameters" not in caught.value.hint
        for weight in weights.values():
            group.broadcast(weight, out=weight)
        sync.check_weights(weights)

    run_world(2, body)


def test_what_most_ranks_hold_is_taken_for_right():
    def body(group):
        sync = GradientSynchronizer({}, group)
        with pytest.raises(CollectiveMismatchError, match="rank 0, rank 3 differ from rank 1"):
            sync.check_weights({"w": np.array([7 if group.rank in (1, 2, 4) else group.rank], ml_dtypes.bfloat16)})

    run_world(5, body)


@pytest.mark.parametrize(
    ("weights", "others", "message"),
    [
        ({"a": X}, {"a": X, "b": X}, r"rank 1 has 'b: float32\[2\]' where rank 0 has 'nothing'"),
        ({"a": X}, {}, r"rank 1 has '' where rank 0 has 'a: "),
        ({"a": X}, {"b": X}, r"rank 1 has 'b: .*' where rank 0 has 'a: "),
        ({"a": X}, {"a": X.reshape(2, 1)}, r"rank 1 has 'a: float32\[2,1\]' where rank 0 has 'a: float32\[2\]'"),
        ({"a": X}, {"a": X.astype(np.int32)}, r"rank 1 has 'a: int32\[2\]' where rank 0 has 'a: float32\[2\]'"),
    ],
)
def test_other_names_dtypes_and_shapes_are_told_as_such(weights, others, message: str):
    def body(group):
        sync = GradientSynchronizer({}, group)
        with pytest.raises(CollectiveMismatchError, match=message):
            sync.check_weights(others if group.rank == 1 else weights)
        group.barrier()

    run_world(3, body)


def test_checks_of_two_groups_of_the_same_ranks_never_meet():
    """Or a difference would go unnoticed, or count as one of the other model's."""

    def body(group):
        syncs = [GradientSynchronizer({}, group.subgroup([0, 1])) for _ in range(2)]
        syncs[group.rank].check_weights({"w": X})

    first, _ = run_world(2, body, timeout=5, return_exceptions=True)
    assert isinstance(first, BarrierTimeoutError)


def test_a_module_is_checked_every_so_many_steps():
    def body(group):
        module = Plain(a=np.zeros(2), b=np.zeros((2, 2)))
        ddp = DistributedDataParallel(module, group, check_every=3)
        for step in range(5):
            module["a"].grad = np.ones(2)
            if step == 4:
                module["b"].data[1, 1] += group.rank  # a fault that the next check is to find
            ddp.sync_gradients()
            module["a"].data -= module["a"].grad
        with pytest.raises(CollectiveMismatchError, match="in step 6: rank 1 differs from rank 0, first in 'b'"):
            ddp.sync_gradients()
        with pytest.raises(CollectiveMismatchError, match=r"hold different weights now.*\ntry: .*broadcast_parameters\(\)"):
            ddp.check_weights()
        ddp.broadcast_parameters()
        ddp.check_weights()
        with pytest.raises(UsageError, match="check_every"):
            DistributedDataParallel(module, group, check_every=-1)

    run_world(2, body)


@pytest.mark.parametrize("follows", [True, False])
def test_uneven_steps_are_checked_where_all_ranks_follow(follows):
    def body(group):
        module = Plain(a=np.zeros(2))
        ddp = DistributedDataParallel(module, group, check_every=1)

        def step():
            module["a"].data -= module["a"].grad

        with ddp.uneven(step if follows else None):
            for _ in range(1 + 2 * group.rank):
                module["a"].grad = np.full(2, 1.0 + group.rank)
                ddp.sync_gradients()
                step()
        ddp.check_weights()

    run_world(3, body)


def test_a_parameter_that_cannot_be_checked_is_named_before_a_step_is_taken():
    """One that does not train needs no mean, so its dtype may be one that cannot be sent."""

    class Frozen:
        requires_grad, grad = False, None

        def __init__(self) -> None:
            self.data = np.zeros(2, [("first", "i4"), ("second", "f4")])

    def body(group):
        module = Plain(a=np.zeros(2))
        module.named["b"] = Frozen()
        with pytest.raises(UsageError, match="parameter 'b': dtype"):
            DistributedDataParallel(module, group, init_sync=False, check_every=100)
        ddp = DistributedDataParallel(module, group, init_sync=False)
        with pytest.raises(UsageError, match="parameter 'b': dtype"):
            ddp.check_weights()

    run_world(1, body)
