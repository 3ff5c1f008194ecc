"""DistributedDataParallel, compared with one process that adds gradients in rank order and divides."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.ddp.module import PASSES_UNTIL_WARNED, DistributedDataParallel
from ferrorpc.ddp.parameter import Parameter
from ferrorpc.ddp.replica import named_parameters
from ferrorpc.errors import CollectiveMismatchError, TensorMismatchError, UsageError
from ferrorpc.testing.reference import divided
from tests.unit.ddp.model import Plain, gradients
from tests.unit.ddp.world import run_world

SHAPES = {"first": (3, 4), "scalar": (), "none": (0, 2), "last": (5,)}


def mean_in_rank_order(per_rank: list[np.ndarray]) -> np.ndarray:
    return divided(reduce(np.add, per_rank), len(per_rank))


def plain(rank: int, dtype=np.float32) -> Plain:
    return Plain(**gradients(100 + rank, SHAPES, dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cap_mb", [np.int8(25), 1e-5])
def test_gradients_become_the_mean_with_the_bits_of_one_process(size, cap_mb):
    def body(group):
        module = plain(group.rank)
        ddp = DistributedDataParallel(module, group, bucket_cap_mb=cap_mb)
        for name, grad in gradients(group.rank, SHAPES).items():
            module[name].grad = grad
        before = {name: module[name].grad for name in SHAPES}
        ddp.sync_gradients()
        assert all(module[name].grad is before[name] for name in SHAPES)
        return {name: module[name].grad.copy() for name in SHAPES}

    results = run_world(size, body)
    for name in SHAPES:
        expected = mean_in_rank_order([gradients(rank, SHAPES)[name] for rank in range(size)])
        for result in results:
            assert result[name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.complex64])
def test_half_and_wide_gradients_are_averaged_in_their_own_precision(dtype):
    def body(group):
        module = plain(group.rank, dtype)
        ddp = DistributedDataParallel(module, group)
        for name, grad in gradients(group.rank, SHAPES, dtype).items():
            module[name].grad = grad
        ddp.sync_gradients()
        return module["first"].grad

    results = run_world(3, body)
    per_rank = [gradients(rank, SHAPES, dtype)["first"] for rank in range(3)]
    wide = [g.astype(np.float32) if np.dtype(dtype).itemsize == 2 else g for g in per_rank]
    expected = mean_in_rank_order(wide).astype(dtype)
    for result in results:
        assert result.dtype == dtype
        assert result.tobytes() == expected.tobytes()


def test_parameters_start_as_rank_zeros_in_the_same_arrays():
    def body(group):
        module = plain(group.rank)
        before = {name: module[name].data for name in SHAPES}
        DistributedDataParallel(module, group)
        assert all(module[name].data is before[name] for name in SHAPES)
        return {name: module[name].data.tobytes() for name in SHAPES}

    results = run_world(3, body)
    expected = {name: array.tobytes() for name, array in gradients(100, SHAPES).items()}
    assert results == [expected] * 3


def test_parameters_stay_apart_without_init_sync_and_can_come_from_any_root():
    def body(group):
        module = plain(group.rank)
        ddp = DistributedDataParallel(module, group, init_sync=False)
        first = module["first"].data.copy()
        ddp.broadcast_parameters(root=2)
        return first, module["first"].data

    results = run_world(3, body)
    for rank, (first, last) in enumerate(results):
        assert first.tobytes() == gradients(100 + rank, SHAPES)["first"].tobytes()
        assert last.tobytes() == gradients(102, SHAPES)["first"].tobytes()


def test_buffers_follow_rank_zero_too():
    class Buffered(Plain):
        def __init__(self, rank: int) -> None:
            super().__init__(first=np.zeros(2))
            self.running = np.full(3, rank, np.int64)

        def named_buffers(self):
            return [("running", self.running)]

    def body(group):
        module = Buffered(group.rank + 5)
        DistributedDataParallel(module, group)
        return module.running.tolist()

    assert run_world(2, body) == [[5, 5, 5]] * 2


def test_no_sync_adds_up_and_the_next_sync_averages_the_sum():
    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group)
        sent = len(group.calls)
        with ddp.no_sync():
            with ddp.no_sync():
                pass
            module["w"].grad = np.full(2, group.rank + 1.0)
            ddp.sync_gradients()
            assert module["w"].grad.tolist() == [group.rank + 1.0] * 2
            assert len(group.calls) == sent
        module["w"].grad += 10
        ddp.sync_gradients()
        return module["w"].grad.tolist()

    assert run_world(2, body) == [[11.5, 11.5]] * 2


def test_a_gradient_missing_on_some_ranks_counts_as_zeros_and_gets_the_mean():
    def body(group):
        module = Plain(used=np.zeros(2), unused=np.zeros(3))
        ddp = DistributedDataParallel(module, group)
        if group.rank == 1:
            module["used"].grad = np.full(2, 4.0)
        ddp.sync_gradients()
        return module["used"].grad.tolist(), module["unused"].grad

    assert run_world(4, body) == [([1.0, 1.0], None)] * 4


def test_read_only_and_strided_gradients_are_averaged():
    def body(group):
        module = Plain(a=np.zeros(3), b=np.zeros(3))
        ddp = DistributedDataParallel(module, group)
        module["a"].grad = np.broadcast_to(np.float64(group.rank), (3,))
        strided = np.full(6, float(group.rank))
        module["b"].grad = strided[::2]
        ddp.sync_gradients()
        return module["a"].grad.tolist(), strided.tolist()

    assert run_world(2, body) == [([0.5] * 3, [0.5, r, 0.5, r, 0.5, r]) for r in (0.0, 1.0)]


def test_a_gradient_of_another_shape_is_refused_before_anything_is_sent():
    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group)
        module["w"].grad = np.zeros(3) if group.rank == 0 else np.zeros(2, np.float32)
        sent = len(group.calls)
        with pytest.raises(TensorMismatchError, match="gradient of 'w'"):
            ddp.sync_gradients()
        return len(group.calls) - sent

    assert run_world(2, body) == [0, 0]


def test_ranks_with_different_models_learn_where_they_differ():
    def body(group):
        module = Plain(w=np.zeros((2, 3 + (group.rank == 2))), b=np.zeros(2))
        with pytest.raises(CollectiveMismatchError) as caught:
            DistributedDataParallel(module, group)
        return caught.value

    for error in run_world(3, body):
        assert sorted(error.signatures) == [0, 2]
        assert "'w: float64[2,4]' where rank 0 has 'w: float64[2,3]'" in str(error)


def test_bare_arrays_and_modules_without_names_are_refused_with_what_to_do():
    class Bare(Plain):
        def named_parameters(self):
            return iter({"w": np.zeros(2, ml_dtypes.bfloat16)}.items())

    def body(group):
        with pytest.raises(UsageError, match=r"ferrorpc\.Parameter\(array\)"):
            DistributedDataParallel(Bare(), group)
        with pytest.raises(UsageError, match=r"no named_parameters\(\)"):
            DistributedDataParallel(object(), group)
        for cap in (0, "25"):
            with pytest.raises(UsageError, match="bucket_cap_mb"):
                DistributedDataParallel(Plain(), group, bucket_cap_mb=cap)
        for count in (0, 1.5):
            with pytest.raises(UsageError, match="no last part"):
                next(DistributedDataParallel(Plain(), group).accumulate(count))
        with pytest.raises(TensorMismatchError, match="mean of int64"):
            DistributedDataParallel(Plain(steps=np.zeros(2, np.int64)), group)
        return len(group.calls)

    assert run_world(1, body) == [0]


def test_shared_parameters_count_once_and_frozen_ones_take_no_part():
    class Shared(Plain):
        def named_parameters(self):
            tied = self["w"]
            return iter([("encoder", tied), ("decoder", tied), ("frozen", self["frozen"])])

    class Frozen(Parameter):
        requires_grad = False

    def body(group):
        module = Shared(w=np.zeros(2))
        module.named["frozen"] = Frozen(np.full(2, float(group.rank)))
        assert list(named_parameters(module)) == ["encoder", "frozen"]
        ddp = DistributedDataParallel(module, group)
        module["w"].grad = np.full(2, float(group.rank))
        module["frozen"].grad = np.full(2, float(group.rank))
        ddp.sync_gradients()
        return module["w"].grad.tolist(), module["frozen"].grad.tolist(), module["frozen"].data.tolist()

    assert run_world(2, body) == [([0.5, 0.5], [r, r], [0.0, 0.0]) for r in (0.0, 1.0)]


def test_a_module_without_parameters_is_fine():
    def body(group):
        ddp = DistributedDataParallel(Plain(), group)
        with ddp.uneven(lambda: None):
            for _ in range(1 + group.rank):
                ddp.sync_gradients()
        return ddp(1)

    assert run_world(2, body) == [1, 1]


def test_the_wrapper_passes_calls_and_modes_on():
    def body(group):
        module = Plain(w=np.zeros(1))
        ddp = DistributedDataParallel(module, group)
        assert ddp.module is module
        assert ddp(3, scale=2) == ddp.forward(3, scale=2) == 6
        assert ddp.eval() is ddp
        assert not module.training
        assert ddp.train() is ddp
        assert module.training
        assert ddp.train(False) is ddp
        assert not module.training
        assert dict(ddp.named_parameters()) == module.named
        assert list(ddp.parameters()) == list(module.named.values())

    run_world(1, body)


def test_what_only_the_module_has_is_asked_of_the_wrapper_in_vain_and_told_where_to_find():
    def body(group):
        ddp = DistributedDataParallel(Plain(w=np.zeros(1)), group)
        with pytest.raises(AttributeError, match=r"no attribute 'named': its module has it\ntry: ddp\.module\.named; or wrap"):
            ddp.named  # noqa: B018
        with pytest.raises(AttributeError, match=r"'DistributedDataParallel' object has no attribute 'nothing'$"):
            ddp.nothing  # noqa: B018
        assert not hasattr(ddp, "named")

    run_world(1, body)


def test_parameter_takes_numbers_and_shows_itself():
    assert Parameter(1.5).data.shape == ()
    assert repr(Parameter(np.zeros((2, 3)), name="w")) == "<Parameter w: float64[2, 3], no gradient>"
    assert repr(Parameter([1, 2], grad=np.zeros(2))) == "<Parameter int64[2], with gradient>"


def test_weights_of_ranks_count_in_the_mean():
    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group)
        module["w"].grad = np.full(2, 4.0 * group.rank)
        with pytest.raises(UsageError, match="weight=nan is no share"):
            ddp.sync_gradients(weight=float("nan"))
        ddp.sync_gradients(weight=1 + 2 * group.rank)
        return module["w"].grad.tolist()

    assert run_world(2, body) == [[3.0, 3.0]] * 2


def test_a_gradient_that_only_ranks_of_weight_zero_have_is_the_mean_there_too():
    """Otherwise only these ranks would update the parameter."""

    def body(group):
        module = Plain(w=np.zeros(2), rare=np.zeros(2))
        ddp = DistributedDataParallel(module, group)
        module["w"].grad = np.full(2, 4.0)
        module["rare"].grad = None if group.rank else np.full(2, np.nan)
        ddp.sync_gradients(weight=group.rank)
        return module["w"].grad.tolist(), module["rare"].grad.tolist()

    assert run_world(2, body) == [([4.0, 4.0], [0.0, 0.0])] * 2


def test_gradients_may_be_the_buckets_memory():
    def body(group):
        module = Plain(used=np.zeros((2, 2)), rarely=np.zeros(2))
        ddp = DistributedDataParallel(module, group, gradient_as_bucket_view=True)
        module["used"].grad, module["rarely"].grad = np.full((2, 2), float(group.rank)), np.full(2, 8.0 * group.rank)
        ddp.sync_gradients()
        held = module["used"].grad
        held += 1  # accumulates in place, as the next step's gradient
        module["rarely"].grad = None
        ddp.sync_gradients()
        assert module["used"].grad is held
        return held.tolist(), module["rarely"].grad

    assert run_world(2, body) == [([[1.5] * 2] * 2, None)] * 2


@pytest.mark.parametrize(
    ("mode", "expected"), [("broadcast", [[1, 2]] * 2), ("mean", [[1.5, 2]] * 2), ("local", [[1, 2], [2, 3]])]
)
def test_buffers_travel_with_each_step(mode, expected):
    class Buffered(Plain):
        def __init__(self) -> None:
            super().__init__(w=np.zeros(2))
            self.running, self.count = np.zeros(1), np.zeros((), np.int64)

        def named_buffers(self):
            return [("running", self.running), ("count", self.count)]

    def body(group):
        module = Buffered()
        ddp = DistributedDataParallel(module, group, buffers=mode)
        module["w"].grad = np.ones(2)
        module.running += 1 + group.rank
        module.count += 2 + group.rank
        ddp.sync_gradients()
        found = [float(module.running[0]), int(module.count)]
        module.running = np.zeros(3)
        if mode != "local":
            with pytest.raises(TensorMismatchError, match="buffer 'running'"):
                ddp.sync_gradients()
        return found

    assert run_world(2, body) == expected


@pytest.mark.parametrize("mode", ["broadcast", "mean"])
def test_a_step_that_its_buffers_keep_from_beginning_may_be_taken_once_they_are_mended(mode):
    class Buffered(Plain):
        buffer = np.zeros(1)

        def named_buffers(self):
            return [("first", np.zeros((), np.int64)), ("buffer", self.buffer)]

    def body(group):
        module = Buffered(w=np.zeros(1))
        ddp = DistributedDataParallel(module, group, buffers=mode)
        module["w"].grad = np.full(1, float(group.rank))
        if group.rank:
            module.buffer = np.zeros(3)
            with pytest.raises(TensorMismatchError, match="buffer 'buffer'"):
                ddp.sync_gradients()
            module.buffer = np.zeros(1)
        ddp.sync_gradients()
        return module["w"].grad.tolist()

    assert run_world(2, body) == [[0.5]] * 2


def test_an_unknown_mode_of_buffers_is_refused():
    def body(group):
        with pytest.raises(UsageError, match="broadcast, mean, local"):
            DistributedDataParallel(Plain(), group, buffers="sometimes")

    run_world(1, body)


def test_a_buffer_that_cannot_be_written_is_refused_by_its_name_when_the_module_is_wrapped():
    def body(group):
        module = Plain(w=np.zeros(2))
        module.named_buffers = lambda: [("mask", np.broadcast_to(1.0, 3))]
        DistributedDataParallel(module, group, init_sync=False, buffers="local")
        for mode in ("broadcast", "mean"):
            with pytest.raises(TensorMismatchError, match="buffer 'mask': out is read-only"):
                DistributedDataParallel(module, group, init_sync=False, buffers=mode)

    run_world(1, body)


def test_weights_that_cannot_be_written_are_refused_by_their_name_before_any_is_sent():
    def body(group):
        module = Plain(w=np.zeros(2), fixed=np.broadcast_to(1.0, 3))
        ddp = DistributedDataParallel(module, group, init_sync=False)
        with pytest.raises(TensorMismatchError, match="array 'fixed': out is read-only"):
            ddp.broadcast_parameters()
        return group.all_reduce(1.0)

    assert run_world(2, body) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("size", "syncs", "modes", "warnings"),
    [(2, False, "tet", 2), (2, False, "ten", 0), (2, False, "ee", 0), (2, True, "tt", 0), (1, False, "tt", 0)],
)
def test_passes_whose_gradients_nobody_averages_are_noticed(caplog, size, syncs, modes, warnings):
    """A script for torch's own wrapper averages nothing with this one, and would not notice. Passes in training mode count, in
    whatever mode the latest is; those in evaluation mode and those within no_sync do not."""

    def body(group):
        ddp = DistributedDataParallel(plain(0), group)
        if syncs:
            ddp.sync_gradients()
        for mode in modes:
            ddp.train(mode != "e")
            with ddp.no_sync() if mode == "n" else nullcontext():
                for _ in range(PASSES_UNTIL_WARNED - 1):
                    assert ddp(1) == 1

    run_world(size, body)
    found = [record.message for record in caplog.records if "sync_gradients" in record.message]
    assert len(found) == warnings
    assert all("ferrorpc.torch.DistributedDataParallel" in message for message in found)
