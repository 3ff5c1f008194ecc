"""Cases that users of data parallelism report as issues elsewhere, tested here in NumPy.

For torch modules, see tests/unit/torch/test_edge_cases.py. All worlds are simulated ones on virtual time.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from ferrorpc.ddp.hooks.compress import Compress
from ferrorpc.ddp.hooks.top_k import TopK
from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.parameter import Parameter
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, PeerLostError, UsageError
from ferrorpc.testing import FaultPlan, run_world
from tests.unit.ddp.model import Plain
from tests.unit.ddp.world import run_world as run_watched


def test_unused_parameters_cost_no_message_of_their_own():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(4), "b": np.zeros(4)}, group)
        sent = len(group.calls)
        found = sync({"a": np.ones(4) if group.rank else None, "b": None})
        assert len(group.calls) == sent + 1
        return found

    for found in run_watched(2, body):
        assert found["a"].tolist() == [0.5] * 4
        assert found["b"] is None


def test_unused_parameters_that_differ_by_rank_and_by_step():
    names = [f"p{index}" for index in range(6)]

    def used(rank, step):
        return [name for index, name in enumerate(names) if (index + step) % 3 != rank and index != step]

    def body(group):
        sync = GradientSynchronizer({name: np.zeros(3) for name in names}, group, bucket_cap_mb=4e-5)
        found = []
        for step in range(4):
            with sync.step() as current:
                for name in used(group.rank, step)[:: 1 if group.rank else -1]:
                    current.ready(name, np.full(3, 1.0 + group.rank))
            found.append({name: None if grad is None else grad[0] for name, grad in current.grads.items()})
        return found

    for found in run_world(2, body, faults=FaultPlan(delay_seconds=(0.0, 0.1))):
        for step in range(4):
            shares = {name: [1.0 + rank for rank in range(2) if name in used(rank, step)] for name in names}
            assert found[step] == {name: sum(share) / 2 if share else None for name, share in shares.items()}


@pytest.mark.parametrize("hook", [None, Compress("f16"), TopK(1.0)])
def test_two_synchronisers_begun_in_different_orders_do_not_mix(hook):
    """Also with hooks of one collective."""

    def body(group):
        like = {"a": np.zeros(8, np.float32)}
        syncs = [GradientSynchronizer(like, group, hook=copy.deepcopy(hook)) for _ in range(2)]
        found = {}
        for number in (0, 1) if group.rank else (1, 0):
            step = syncs[number].step().__enter__()
            step.ready("a", np.full(8, 10.0 * number + group.rank, np.float32))
            found[number] = step
        for step in found.values():
            step.__exit__(None, None, None)
        return [found[number].grads["a"][0] for number in range(2)]

    assert run_world(2, body, faults=FaultPlan(delay_seconds=(0.0, 0.1))) == [[0.5, 10.5]] * 2


def test_a_step_that_was_made_and_never_entered_leaves_the_next_ones_alone():
    """Also where only one rank made it: it is no step of that rank's."""

    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        if group.rank == 1:
            with pytest.raises(UsageError, match="not open"):
                sync.step().ready("a", np.zeros(2))
        with sync.step() as step:
            step.ready("a", np.full(2, float(group.rank)))
        with pytest.raises(UsageError, match="used before"), step:
            pass
        return step.grads["a"].tolist()

    assert run_world(2, body) == [[0.5, 0.5]] * 2


def test_accumulation_with_uneven_microbatches_travels_once():
    """Four rows on one rank, in three parts; two on the other, in one."""
    rows = [np.array([1.0, 2.0, 3.0, 6.0]), np.array([9.0, 3.0])]
    cuts = [[slice(0, 1), slice(1, 3), slice(3, 4)], [slice(0, 2)]]

    def body(group):
        mine = rows[group.rank]
        sync = GradientSynchronizer({"g": np.zeros(1)}, group)
        sent = len(group.calls)
        with sync.step(weight=len(mine)) as step:
            for cut in cuts[group.rank]:
                step.add("g", mine[cut].sum(keepdims=True) / len(mine))
            step.ready("g")
        assert len(group.calls) == sent + 1
        return step.grads["g"].tolist()

    assert run_watched(2, body) == [[4.0]] * 2


def test_accumulate_counts_by_any_integer():
    def body(group):
        ddp = DistributedDataParallel(Plain(w=np.zeros(2)), group)
        with pytest.raises(UsageError, match="no last part"):
            next(ddp.accumulate(0.5))
        return list(ddp.accumulate(np.int64(3)))

    assert run_world(1, body) == [[0, 1, 2]]


def test_accumulate_averages_a_modules_gradients_with_the_last_part():
    parts = [1, 3]

    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group)
        for part in ddp.accumulate(parts[group.rank]):
            module["w"].grad = np.full(2, 1.0 + part) + (0 if module["w"].grad is None else module["w"].grad)
            ddp.sync_gradients()
        with pytest.raises(UsageError, match="no last part"):
            list(ddp.accumulate(0))
        return module["w"].grad.tolist()

    assert run_world(2, body) == [[3.5, 3.5]] * 2


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ends", [[], [0, 1], [1, 0]])
def test_an_accumulation_that_was_left_half_way_takes_nothing_from_the_next_steps(ends, count):
    """A kept exception keeps the frame in which it is suspended, and so the block that averages nothing."""

    def body(group):
        module = Plain(w=np.zeros(1))
        ddp = DistributedDataParallel(module, group)

        def step(parts):
            module["w"].grad = None
            for _ in parts:
                module["w"].grad = np.full(1, float(group.rank))
                ddp.sync_gradients()
            return module["w"].grad[0]

        left = [ddp.accumulate(3), ddp.accumulate(2)]
        for each in left:
            next(each)
        for index in ends:
            left[index].close()
        means = [step(ddp.accumulate(count)), step([0])]
        with ddp.no_sync():
            means.append(step([0]))
        return means, len(left)

    assert run_world(2, body) == [([0.5, 0.5, float(rank)], 2) for rank in range(2)]


def test_an_accumulation_within_another_one_is_refused():
    def body(group):
        ddp = DistributedDataParallel(Plain(w=np.zeros(1)), group)
        parts = ddp.accumulate(3)
        next(parts)
        assert list(ddp.accumulate(2)) == [0, 1]
        with pytest.raises(UsageError, match="within another one"):
            next(parts)
        return ddp._replica.syncs

    assert run_world(1, body) == [True]


@pytest.mark.parametrize("counts", [[3, 3], [1, 4], [0, 2], [5, 1, 3]])
def test_uneven_inputs_weigh_a_finished_rank_nothing(counts):
    def body(group):
        sync = GradientSynchronizer({"g": np.zeros(2)}, group, bucket_cap_mb=1e-5)
        found = []
        with sync.uneven(follow=lambda grads: found.append(grads["g"][0])):
            for step in range(counts[group.rank]):
                found.append(sync({"g": np.full(2, 10.0 * step + group.rank)})["g"][0])
        found.append(sync({"g": np.full(2, float(group.rank))})["g"][0])
        return found

    def mean(step):
        active = [rank for rank, count in enumerate(counts) if count > step]
        return sum(10.0 * step + rank for rank in active) / len(active)

    expected = [mean(step) for step in range(max(counts))] + [(len(counts) - 1) / 2]
    assert run_world(len(counts), body, faults=FaultPlan(delay_seconds=(0.0, 0.2))) == [expected] * len(counts)


def test_uneven_inputs_may_be_weighted_and_an_error_within_is_not_waited_out():
    def body(group):
        sync = GradientSynchronizer({"g": np.zeros(1)}, group)
        found = []
        with sync.uneven(follow=lambda grads: found.append(grads["g"][0])):
            for _ in range(1 + group.rank):
                found.append(sync({"g": np.full(1, 4.0 * group.rank)}, weight=3 - 2 * group.rank)["g"][0])
            with pytest.raises(UsageError, match="open already"), sync.uneven():
                pass
        if group.rank == 0:
            raise KeyError("enough")
        with sync.uneven():
            sync({"g": np.zeros(1)})

    outcomes = run_world(2, body, return_exceptions=True)
    assert isinstance(outcomes[0], KeyError)
    assert isinstance(outcomes[1], PeerLostError)
    assert "enough" in str(outcomes[1])


def uneven_steps_of_a_synchroniser(group, count, last, follow):
    sync = GradientSynchronizer({"w": np.zeros(2)}, group)
    with sync.uneven(lambda _: follow()):
        for _ in range(count):
            sync({"w": np.ones(2)})
        last()


def uneven_steps_of_a_module(group, count, last, follow):
    ddp = DistributedDataParallel(Plain(w=np.zeros(2)), group)
    with ddp.uneven(follow):
        for _ in range(count):
            ddp.sync_gradients()
        last()


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("steps", [uneven_steps_of_a_synchroniser, uneven_steps_of_a_module])
def test_an_error_that_leaves_an_uneven_block_and_is_caught_is_what_the_others_hear_of(steps, follows):
    """Not their timeout after a minute. The error is the block's own, or that of `follow`."""

    def fails():
        raise ZeroDivisionError

    def passes():
        pass

    def body(group):
        if group.rank == 1:
            with pytest.raises(ZeroDivisionError):
                steps(group, 1, passes if follows else fails, fails)
        else:
            with pytest.raises(GroupAbortedError):
                steps(group, 3, passes, passes)
        with pytest.raises(GroupAbortedError) as caught:
            group.barrier()
        return caught.value.rank, caught.value.cause

    assert run_world(2, body) == [(1, "ZeroDivisionError")] * 2


def test_a_finished_rank_takes_weights_from_the_one_with_the_most_steps():
    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group)
        with ddp.uneven():
            for _ in range([1, 3, 2][group.rank]):
                module["w"].grad = np.ones(2)
                ddp.sync_gradients()
                module["w"].data -= module["w"].grad
        return module["w"].data.tolist()

    assert run_world(3, body) == [[-3.0, -3.0]] * 3


def test_a_finished_rank_that_follows_needs_nobodys_weights():
    def body(group):
        module = Plain(w=np.zeros(2), never=np.zeros(1))
        ddp = DistributedDataParallel(module, group)
        steps = []

        def follow():
            steps.append(module["w"].grad.tolist())
            module["w"].data -= module["w"].grad

        with ddp.uneven(follow):
            for step in range(1 + 2 * group.rank):
                module["w"].grad = np.full(2, float(step + group.rank))
                ddp.sync_gradients()
                module["w"].data -= module["w"].grad
        assert module["never"].grad is None
        return len(steps), module["w"].data.tolist()

    assert run_world(2, body) == [(2, [-5.5, -5.5]), (0, [-5.5, -5.5])]


def test_a_finished_rank_that_follows_has_no_gradient_of_what_the_others_do_not_use():
    def body(group):
        module = Plain(first=np.zeros(2), later=np.zeros(2))
        ddp = DistributedDataParallel(module, group)

        def update():
            for each in module.parameters():
                if each.grad is not None:
                    each.data -= each.grad

        with ddp.uneven(update):
            for step in range(1 + 2 * group.rank):
                for each in module.parameters():
                    each.grad = None
                module["later" if step else "first"].grad = np.ones(2)
                ddp.sync_gradients()
                update()
        return [each.data.tolist() for each in module.parameters()]

    assert run_world(2, body) == [[[-1.0, -1.0], [-2.0, -2.0]]] * 2


@pytest.mark.parametrize("follow", [None, lambda: None])
@pytest.mark.parametrize(("mode", "expected"), [("broadcast", [2.0, 2.0]), ("mean", [2.0, 2.0]), ("local", [1.0, 2.0])])
def test_buffers_come_from_the_rank_with_the_most_steps_unless_they_are_local(mode, expected, follow):
    class Buffered(Plain):
        def named_buffers(self):
            return [("running", self.running)]

    def body(group):
        module = Buffered(w=np.zeros(2))
        module.running = np.zeros(1)
        ddp = DistributedDataParallel(module, group, buffers=mode)
        with ddp.uneven(follow):
            for _ in range(1 + group.rank):
                module["w"].grad = np.ones(2)
                module.running += 1
                ddp.sync_gradients()
        return module.running.item()

    assert run_world(2, body) == expected


def test_mixed_dtypes_and_a_parameter_of_no_elements():
    dtypes = {"a": np.float32, "b": np.float64, "c": np.float16, "d": np.complex128}

    def body(group):
        like = {name: np.zeros(3, dtype) for name, dtype in dtypes.items()} | {"none": np.zeros((0, 4), np.float32)}
        sync = GradientSynchronizer(like, group)
        return sync({name: np.full_like(leaf, group.rank + 1) for name, leaf in like.items()})

    for found in run_world(2, body):
        assert found["none"].shape == (0, 4)
        for name, dtype in dtypes.items():
            assert found[name].dtype == dtype
            assert found[name].tolist() == [1.5] * 3


def test_a_parameter_added_after_wrapping_is_named():
    class Frozen(Parameter):
        requires_grad = False

    def body(group):
        module = Plain(w=np.zeros(2))
        module.named["still"] = Frozen(np.zeros(1))
        ddp = DistributedDataParallel(module, group)
        module.named["late"] = Parameter(np.zeros(2), grad=np.zeros(2))
        with pytest.raises(UsageError, match="'late' was added"):
            ddp.sync_gradients()
        kept = module.named.pop("late"), module.named.pop("w")
        with pytest.raises(UsageError, match="'w' was taken away"):
            ddp.sync_gradients()
        module.named["w"] = kept[0]
        with pytest.raises(UsageError, match="'w' was replaced"):
            ddp.sync_gradients()
        module.named["w"] = kept[1]
        module["still"].requires_grad = True
        with pytest.raises(UsageError, match="'still' was frozen"):
            ddp.sync_gradients()

    run_world(1, body)


def test_ranks_whose_frozen_parameters_differ_learn_where_before_any_weight_moves():
    """Together they are equally large on both ranks."""

    class Frozen(Parameter):
        requires_grad = False

    def body(group):
        module = Plain(w=np.zeros(2))
        module.named["a"], module.named["b"] = Frozen(np.full(2 + group.rank, 1.0)), Frozen(np.full(3 - group.rank, 2.0))
        with pytest.raises(CollectiveMismatchError, match=r"'a: float64\[3\]' where rank 0 has 'a: float64\[2\]'"):
            DistributedDataParallel(module, group)
        return module["a"].data.tolist()

    assert run_world(2, body) == [[1.0] * 2, [1.0] * 3]


def test_a_rank_that_never_comes_is_named_with_the_gradients_it_owes():
    def body(group):
        sync = GradientSynchronizer({f"layer{index}": np.zeros(2) for index in range(6)}, group)
        if group.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                sync({f"layer{index}": np.zeros(2) for index in range(6)})
            assert caught.value.waiting_on == [1]
            assert caught.value.__notes__ == ["while averaging bucket 0 (layer5, layer4, layer3, layer2 and 2 more), step 0"]
        else:
            group.session.clock.parker().park(group.session.clock.now() + 30)

    run_world(2, body, timeout=5.0)


def test_ranks_with_another_cap_or_order_learn_it_before_any_gradient_moves():
    def body(group):
        like = {"a": np.zeros(2), "b": np.zeros(2)}
        with pytest.raises(CollectiveMismatchError, match="bucket cap 2097152 bytes"):
            GradientSynchronizer(like, group, bucket_cap_mb=1 + group.rank)
        with pytest.raises(CollectiveMismatchError, match="expected: a"):
            GradientSynchronizer(like, group, order=["a", "b"] if group.rank else None)
        return GradientSynchronizer(like, group, order=["a", "b"])({"a": np.ones(2), "b": np.ones(2)})["b"].tolist()

    assert run_world(2, body) == [[1.0, 1.0]] * 2


def test_a_weight_of_zero_hides_even_what_is_not_a_number():
    def body(group):
        sync = GradientSynchronizer({"g": np.zeros(2)}, group)
        return sync({"g": np.full(2, [np.nan, 3.0][group.rank])}, weight=group.rank)["g"].tolist()

    assert run_world(2, body) == [[3.0, 3.0]] * 2


def test_weights_beyond_any_number_are_an_error():
    def body(group):
        sync = GradientSynchronizer({"g": np.zeros(2, np.float32)}, group)
        with pytest.raises(UsageError, match="sum to inf"):
            sync({"g": np.ones(2, np.float32)}, weight=3e38)

    run_world(2, body)


def test_weights_that_are_zero_in_one_dtype_alone_are_an_error_on_every_rank():
    """Whichever bucket is reduced last, which differs between ranks."""

    def body(group):
        sync = GradientSynchronizer({"single": np.zeros(2, np.float32), "double": np.zeros(2)}, group)
        for number in range(2):
            step = sync.step(weight=1e-47).__enter__()
            for name in ("single", "double")[:: 1 if number else -1]:
                step.ready(name, np.ones(2, np.float32 if name == "single" else np.float64))
                group.barrier()
            with pytest.raises(UsageError, match="sum to zero"):
                step.__exit__(None, None, None)

    run_world(2, body)
