"""Data parallelism with buckets on GPUs, over the fakes: the bits of NumPy, in streams, without waiting for the GPU."""

from __future__ import annotations

import gc
import random
import threading
from functools import partial, reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ferrorpc
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.kinds import kind_of, spec_of
from ferrorpc.ddp import device_bucket_memory, reducer
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.device_bucket_memory import DeviceBucketMemory, DeviceContext
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.kernels.cuda.launcher import DeviceKernels
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.reference import divided
from tests.fake_gpu.ddp_worlds import LANES, Array, at_home, on_gpu, world
from tests.unit.ddp.model import Plain

SHAPES = {"weight": (3, 4), "scalar": (), "none": (0, 2), "bias": (5,), "last": (7,)}
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64]


def gradients(rank: int, dtype: Any, whole: bool = False, step: int = 0) -> dict[str, Array]:
    """One rank's, some of them subnormal as single floats; whole numbers add up to the same bits in any order."""
    chance = np.random.default_rng([rank, step])

    def drawn_for(shape: tuple[int, ...]) -> Array:
        if whole:
            return chance.integers(-8, 8, shape)
        return np.asarray(chance.standard_normal(shape) * 10.0 ** chance.choice([0, -40], shape))

    drawn = {name: drawn_for(shape) for name, shape in SHAPES.items()}
    return {name: np.asarray(array).astype(dtype) for name, array in drawn.items()}


def mean(arrays: list[Array], weights: list[float] | None) -> Array:
    """In one process, in rank order: half types in float32, rounded once."""
    dtype = arrays[0].dtype
    wide = [array.astype(np.float32) if dtype.itemsize == 2 else array for array in arrays]
    if weights is None:
        return divided(np.asarray(reduce(np.add, wide)), len(wide)).astype(dtype)
    real = np.zeros((), wide[0].dtype).real.dtype.type
    shares = [array * real(weight) for array, weight in zip(wide, weights, strict=True)]
    return divided(np.asarray(reduce(np.add, shares)), sum(weights)).astype(dtype)


def check(found: list[dict[str, Array]], per_rank: list[dict[str, Array]], weights: list[float] | None) -> None:
    for result in found:
        for name in SHAPES:
            expected = mean([each[name] for each in per_rank], weights)
            assert result[name].tobytes() == expected.tobytes(), name
            assert (result[name].dtype, result[name].shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize("weights", [None, [3.0, 0.5, 2.0, 0.0]], ids=["even", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("lanes", LANES)
def test_means_have_the_bits_of_one_process_whatever_the_dtype(
    cupy: StandIn, lanes: str, dtype: Any, weights: list[float] | None
) -> None:
    """Two ranks: their sum has the same bits in either order, which is what NCCL leaves open."""
    shares = None if weights is None else weights[:2]

    def body(group: ProcessGroup) -> Any:
        mine = gradients(group.rank, dtype)
        sync = ferrorpc.GradientSynchronizer(on_gpu(cupy, mine), group)
        weight = None if shares is None else shares[group.rank]
        return at_home(cupy, sync(on_gpu(cupy, mine), weight=weight))

    check(world(cupy, lanes, 2, body), [gradients(rank, dtype) for rank in range(2)], shares)


@pytest.mark.parametrize("cap_mb", [25, 1e-4, 1e-5])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lanes", LANES)
def test_means_have_the_bits_of_one_process_in_any_order_and_bucket(
    cupy: StandIn, lanes: str, size: int, cap_mb: float
) -> None:
    whole = lanes != "simulated"

    def body(group: ProcessGroup) -> Any:
        sync = ferrorpc.GradientSynchronizer(on_gpu(cupy, gradients(0, np.float32)), group, bucket_cap_mb=cap_mb)
        found = []
        for step in range(3):
            mine = on_gpu(cupy, gradients(group.rank, np.float32, whole, step))
            order = list(SHAPES)
            random.Random(10 * group.rank + step).shuffle(order)
            with sync.step() as current:
                for name in order:
                    current.ready(name, mine[name])
            found.append(at_home(cupy, current.grads))
        return found

    results = world(cupy, lanes, size, body)
    for step in range(3):
        per_rank = [gradients(rank, np.float32, whole, step) for rank in range(size)]
        check([found[step] for found in results], per_rank, None)


@pytest.mark.parametrize("lanes", LANES)
def test_buckets_leave_while_the_gpu_still_computes_and_the_host_goes_on(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> Any:
        like = {name: cupy.asarray(np.zeros(300)) for name in "abcdef"}
        sync = ferrorpc.GradientSynchronizer(like, group, bucket_cap_mb=0.004)
        flying = group._dispatch._in_flight
        released: list[bool] = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.fake.enqueue(lambda: bool(released))  # what the gradients wait for takes long
            with sync.step() as step:
                for turn, name in enumerate("fedcba"):
                    step.ready(name, cupy.asarray(np.full(300, group.rank + float(turn))))
                    if turn == 3:
                        assert len(flying) == 4, "each bucket leaves with its last gradient"
                assert len(flying) == 6
                assert not released, "the host got here although no GPU has begun"
                released.append(True)
            return [float(step.grads[name][0]) for name in "fedcba"]

    assert world(cupy, lanes, 2, body) == [[turn + 0.5 for turn in range(6)]] * 2


@pytest.mark.parametrize("lanes", ["nccl", "hybrid"])
def test_a_bucket_is_not_written_again_before_its_means_were_read(cupy: StandIn, lanes: str) -> None:
    """The step that follows runs in another stream, which knows nothing of the one that still reads."""

    def body(group: ProcessGroup) -> Any:
        like = {"a": cupy.asarray(np.zeros(64))}
        sync = ferrorpc.GradientSynchronizer(like, group, gradient_as_bucket_view=True)
        first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        released: list[bool] = []
        with first:
            means = sync({"a": cupy.asarray(np.full(64, 1.0 + group.rank))})
            first.fake.enqueue(lambda: bool(released))
            read = means["a"] * 10
        with second:
            step = sync.step().__enter__()
            step.ready("a", cupy.asarray(np.full(64, 100.0)))
            for _ in range(20):
                cupy.machine.step()
            released.append(True)
            step.__exit__(None, None, None)
            last = cupy.asnumpy(step.grads["a"])
        with first:
            return cupy.asnumpy(read)[0], last[0]

    assert world(cupy, lanes, 2, body) == [(15.0, 100.0)] * 2


def test_a_synchroniser_may_be_dropped_while_its_means_are_still_copied(cupy: StandIn) -> None:
    """It was made in one stream, to which its memory goes back, and used in another. Only this rank moves them."""

    def body(group: ProcessGroup) -> Any:
        names = [f"p{number}" for number in range(9)]
        like = {name: cupy.asarray(np.zeros(4)) for name in names}
        sync = ferrorpc.GradientSynchronizer(like, group)
        with cupy.cuda.Stream(non_blocking=True):
            means = sync({name: cupy.asarray(np.full(4, 3.0)) for name in names})
            del sync
            for _ in range(3):
                cupy.machine.step()  # now the memory would be overwritten
            return [float(means[name][0]) for name in names]

    assert world(cupy, "simulated", 1, body) == [[3.0] * 9]


def test_buckets_may_be_garbage_in_one_circle_with_the_streams_that_used_them(cupy: StandIn) -> None:
    """As after an exception, whose traceback holds them all. Which finalizer comes first is the collector's choice."""

    def body(group: ProcessGroup) -> None:
        stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        circle: list[Any] = [stream, other]
        circle.append(circle)
        with stream:
            grads = {"a": cupy.asarray(np.ones(4, np.float16))}
            sync = ferrorpc.GradientSynchronizer(grads, group)
        with other:
            sync(grads, weight=1)
        circle.append(sync)
        del stream, other, sync, circle
        gc.collect()

    assert world(cupy, "simulated", 1, body) == [None]


def test_a_synchroniser_may_go_together_with_the_stream_that_still_copies_its_means(cupy: StandIn) -> None:
    """Memory goes back in its stream's order only as long as that is there."""

    def body(group: ProcessGroup) -> Any:
        names = [f"p{number}" for number in range(9)]

        def step() -> Any:
            with cupy.cuda.Stream(non_blocking=True):
                sync = ferrorpc.GradientSynchronizer({name: cupy.asarray(np.zeros(4)) for name in names}, group)
                return sync({name: cupy.asarray(np.full(4, 3.0)) for name in names})

        means = step()
        cupy.machine.settle()
        return [float(means[name][0]) for name in names]

    assert world(cupy, "simulated", 1, body) == [[3.0] * 9]


def test_so_may_one_of_halves_whose_sums_lie_in_memory_of_a_third_stream(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> Any:
        ones = cupy.asarray(np.ones(4, np.float16))
        like = dict.fromkeys("abc", ones)
        sync = ferrorpc.GradientSynchronizer(like, group)
        first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with first:
            sync(like, weight=1)  # the float32 sums are made here
            cupy.machine.settle()
        with second:
            means = sync(like, weight=2)
            del sync
            for _ in range(2):
                cupy.machine.step()
            return [float(means[name][0]) for name in "abc"]

    assert world(cupy, "simulated", 1, body) == [[1.0] * 3]


def test_a_gradient_may_be_overwritten_in_its_stream_as_soon_as_it_was_ready(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> Any:
        like = {"a": cupy.asarray(np.zeros(4, np.float32)), "b": cupy.asarray(np.zeros(4, np.float32))}
        sync = ferrorpc.GradientSynchronizer(like, group)
        scratch = cupy.asarray(np.full(4, 1.0, np.float32))
        with sync.step() as step:
            step.ready("a", scratch)
            scratch[...] = 2.0
            step.ready("b", scratch)
            scratch[...] = 3.0
        return float(step.grads["a"][0]), float(step.grads["b"][0])

    assert world(cupy, "hybrid", 2, body) == [(1.0, 2.0)] * 2


@pytest.mark.parametrize("weight", [None, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_gradient_computed_in_its_place_is_not_copied(cupy: StandIn, dtype: Any, weight: float | None) -> None:
    def body(group: ProcessGroup) -> Any:
        like = on_gpu(cupy, {"a": np.zeros((2, 3), dtype), "b": np.zeros(2, dtype)})
        sync = ferrorpc.GradientSynchronizer(like, group, gradient_as_bucket_view=True)
        found = []
        for number in range(2):
            with sync.step(weight) as step:
                place = step.place("a")
                ones = cupy.asarray(np.ones((2, 3), dtype))
                np.add(ones, cupy.asarray(np.full((2, 3), group.rank + number, dtype)), out=place)
                step.ready("a")
                step.ready("b", cupy.asarray(np.full(2, 4, dtype)))
            assert (step.grads["a"].data.ptr, step.grads["a"].dtype) == (place.data.ptr, np.dtype(dtype))
            found.append(cupy.asnumpy(step.grads["a"]).real.astype(float).tolist())
        return found

    assert world(cupy, "hybrid", 2, body) == [[[[1.5] * 3] * 2, [[2.5] * 3] * 2]] * 2


@pytest.mark.parametrize("weights", [None, [1.0, 2.0]], ids=["even", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_parts_of_a_gradient_add_up_as_in_numpy(cupy: StandIn, dtype: Any, weights: list[float] | None) -> None:
    """Those of half types in float32; they are rounded once, where they are averaged in their type or as their mean."""
    parts = [np.random.default_rng(part).standard_normal(9).astype(dtype) for part in range(3)]

    def body(group: ProcessGroup) -> Any:
        sync = ferrorpc.GradientSynchronizer({"a": cupy.asarray(parts[0])}, group)
        with sync.step(weight=None if weights is None else weights[group.rank]) as step:
            step.add("a", cupy.asarray(parts[0]))
            step.add("a", cupy.asarray(parts[1]))
            step.ready("a", cupy.asarray(parts[2]))
        return cupy.asnumpy(step.grads["a"])

    whole = reduce(np.add, [part.astype(np.float32) if part.dtype.itemsize == 2 else part for part in parts])
    whole = whole.astype(dtype) if weights is None else whole
    for found in world(cupy, "hybrid", 2, body):
        assert found.tobytes() == mean([whole, whole], weights).astype(dtype).tobytes()


@pytest.mark.parametrize("lanes", LANES)
def test_unused_gradients_that_differ_by_rank_and_step(cupy: StandIn, lanes: str) -> None:
    names = [f"p{index}" for index in range(6)]

    def used(rank: int, step: int) -> list[str]:
        return [name for index, name in enumerate(names) if (index + step) % 3 != rank and index != step]

    def body(group: ProcessGroup) -> Any:
        sync = ferrorpc.GradientSynchronizer(on_gpu(cupy, {n: np.zeros(3) for n in names}), group, bucket_cap_mb=4e-5)
        found = []
        for step in range(3):
            grads = {n: cupy.asarray(np.full(3, 1.0 + group.rank)) if n in used(group.rank, step) else None for n in names}
            means = sync(grads)
            found.append({name: None if each is None else float(each[0]) for name, each in means.items()})
        return found

    for found in world(cupy, lanes, 2, body):
        for step in range(3):
            shares = {name: [1.0 + rank for rank in range(2) if name in used(rank, step)] for name in names}
            assert found[step] == {name: sum(share) / 2 if share else None for name, share in shares.items()}


@pytest.mark.parametrize("lanes", LANES)
def test_uneven_inputs_weigh_a_finished_rank_nothing(cupy: StandIn, lanes: str) -> None:
    counts = [1, 3]

    def body(group: ProcessGroup) -> Any:
        sync = ferrorpc.GradientSynchronizer({"g": cupy.asarray(np.zeros(2))}, group)
        found = []
        with sync.uneven(follow=lambda grads: found.append(float(grads["g"][0]))):
            for step in range(counts[group.rank]):
                found.append(float(sync({"g": cupy.asarray(np.full(2, 10.0 * step + group.rank))})["g"][0]))
        with pytest.raises(UsageError, match="sum to zero"):
            sync({"g": cupy.asarray(np.ones(2))}, weight=0)
        return found

    assert world(cupy, lanes, 2, body) == [[0.5, 11.0, 21.0]] * 2


@pytest.mark.parametrize("lanes", LANES)
def test_a_weight_beyond_float32_is_an_error_of_ours_where_numpy_is_to_raise_its_own(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> Any:
        grads = on_gpu(cupy, {"g": np.ones(2, np.float32)})
        sync = ferrorpc.GradientSynchronizer(grads, group)
        with np.errstate(all="raise"), pytest.raises(UsageError, match="sum to inf"):
            sync(grads, weight=1e39)
        return at_home(cupy, sync(grads, weight=1))["g"].tolist()

    assert world(cupy, lanes, 2, body) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("lanes", LANES)
def test_a_module_accumulates_keeps_what_nobody_used_and_writes_in_place(cupy: StandIn, lanes: str, views: bool) -> None:
    def body(group: ProcessGroup) -> Any:
        module = Plain(**on_gpu(cupy, {name: np.zeros(3) for name in ("used", "half", "never")}))
        ddp = ferrorpc.DistributedDataParallel(module, group, gradient_as_bucket_view=views)
        strided = cupy.asarray(np.zeros(6))[::2]
        module["half"].grad = strided
        for part in ddp.accumulate(2):
            grad = cupy.asarray(np.full(3, 1.0 + part + group.rank))
            module["used"].grad = grad if part == 0 else module["used"].grad + grad
            ddp.sync_gradients()
        held = module["used"].grad
        held += 1.0  # the next step's gradient, in place
        module["half"].grad = cupy.asarray(np.full(3, 8.0)) if group.rank else None
        ddp.sync_gradients(weight=1 + 2 * group.rank)
        assert module["used"].grad is held
        inside = (
            module["used"].grad.data.ptr
            == ddp._replica.reducer.at("used")[0].place(ddp._replica.reducer.layout.slots["used"]).data.ptr
        )
        return float(held[2]), cupy.asnumpy(module["half"].grad).tolist(), module["never"].grad, inside

    assert world(cupy, lanes, 2, body) == [(5.0, [6.0] * 3, None, views)] * 2


@pytest.mark.parametrize("lanes", LANES)
def test_gradients_may_lie_in_the_slots_of_others(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> Any:
        grads = on_gpu(cupy, {"a": np.full(4, 1, np.float32), "b": np.full(4, 2, np.float32)})
        module = Plain(**on_gpu(cupy, {name: np.zeros(4, np.float32) for name in grads}))
        ddp = ferrorpc.DistributedDataParallel(module, group, gradient_as_bucket_view=True)
        sync = ferrorpc.GradientSynchronizer(grads, group, gradient_as_bucket_view=True)
        a, b, means = module["a"], module["b"], sync(grads)
        a.grad, b.grad = grads["a"], grads["b"]
        ddp.sync_gradients()
        a.grad, b.grad, means = b.grad, a.grad, sync({"a": means["b"], "b": means["a"]})
        ddp.sync_gradients()
        return [float(array[3]) for array in (a.grad, b.grad, means["a"], means["b"])]

    assert world(cupy, lanes, 2, body) == [[2.0, 1.0, 2.0, 1.0]] * 2


@pytest.mark.parametrize("lanes", LANES)
def test_a_module_whose_rank_has_left_follows_the_others_steps(cupy: StandIn, lanes: str) -> None:
    counts = [3, 1]

    def body(group: ProcessGroup) -> Any:
        module = Plain(w=cupy.asarray(np.zeros(2)))
        ddp = ferrorpc.DistributedDataParallel(module, group)

        def descend() -> None:
            module["w"].data -= module["w"].grad
            module["w"].grad = None

        with ddp.uneven(follow=descend):
            for step in range(counts[group.rank]):
                module["w"].grad = cupy.asarray(np.full(2, 10.0 * step + group.rank))
                ddp.sync_gradients()
                descend()
        ddp.check_weights()
        return cupy.asnumpy(module["w"].data).tolist()

    assert world(cupy, lanes, 2, body) == [[-0.5 - 10.0 - 20.0] * 2] * 2


def test_a_bucket_that_is_given_up_leaves_its_header_to_the_gpu_until_that_has_read_it(cupy: StandIn) -> None:
    x = cupy.asarray(np.ones(4))
    bucket = lay_out([("a", spec_of(x))], 1 << 20).buckets[0]
    released: list[bool] = []
    with cupy.cuda.Stream(non_blocking=True) as stream:
        memory = DeviceBucketMemory(bucket, DeviceContext(kind_of(x), partial(Guard, SYSTEM_CLOCK, Latch(), 20.0)))
        stream.fake.enqueue(lambda: bool(released))
        memory.begin(None, follows=False)
        memory.pack()
        del memory
        live = cupy.machine.pinned.live_blocks
        released.append(True)
    cupy.machine.settle()  # the fixture fails where pinned memory had gone
    device_of(cupy, 0).staging.to_device(np.ones(1))
    assert cupy.machine.pinned.live_blocks == live  # a slot more, a header less


@pytest.mark.parametrize("lanes", ["nccl", "hybrid"])
def test_the_headers_of_all_buckets_are_on_their_way_before_the_host_waits_for_any(
    cupy: StandIn, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    download, wait_within = Device.download, device_bucket_memory.wait_within
    monkeypatch.setattr(Device, "download", lambda *given: (told.append("download"), download(*given))[1])
    monkeypatch.setattr(device_bucket_memory, "wait_within", lambda *given: (told.append("wait"), wait_within(*given))[1])

    def body(group: ProcessGroup) -> None:
        counted: list[float] = []
        monkeypatch.setattr(group.session.activity, "operated", counted.append)
        tree = {name: cupy.asarray(np.ones(300)) for name in "abcd"}
        sync = ferrorpc.GradientSynchronizer(tree, group, bucket_cap_mb=0.002)
        told.clear()
        counted.clear()
        sync(tree)
        assert told == ["download"] * 4 + ["wait"] * 4
        assert counted == [], "the step itself counts its waits"

    world(cupy, lanes, 1, body)


def test_gradients_given_at_once_are_packed_and_given_out_by_one_kernel_a_bucket(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    run = DeviceKernels._run
    monkeypatch.setattr(DeviceKernels, "_run", lambda self, name, *rest: (runs.append(name), run(self, name, *rest))[1])

    def body(group: ProcessGroup) -> None:
        tree = on_gpu(cupy, gradients(0, np.float16))
        sync = ferrorpc.GradientSynchronizer(tree, group)
        sync(tree)
        assert runs == ["pack_f16_f16", "unpack_f16_f16"]
        runs.clear()
        sync(tree, weight=2)
        assert runs == ["pack_f16_f32", "sum_peers_f32", "unpack_f32_f16", "unpack_f16_f16"]

    world(cupy, "simulated", 1, body)


def test_ranks_with_and_without_a_gpu_average_over_host_lanes(cupy: StandIn) -> None:
    per_rank = [gradients(rank, np.float16) for rank in range(2)]

    def body(group: ProcessGroup) -> Any:
        mine = per_rank[group.rank] if group.rank else on_gpu(cupy, per_rank[0])
        found = ferrorpc.GradientSynchronizer(mine, group)(mine, weight=1.0 + group.rank)
        return found if group.rank else at_home(cupy, found)

    check(world(cupy, "simulated", 2, body), per_rank, [1.0, 2.0])


@pytest.mark.parametrize("lanes", LANES)
def test_buckets_on_gpus_that_go_through_the_host_are_told_of_once(
    cupy: StandIn, lanes: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer, "_warned", threading.Lock())

    def body(group: ProcessGroup) -> None:
        for _ in range(2):
            ferrorpc.GradientSynchronizer(on_gpu(cupy, {"a": np.zeros(3)}), group)

    world(cupy, lanes, 2, body)
    told = [record.message for record in caplog.records if "through the host" in record.message]
    assert len(told) == (lanes == "simulated")
    assert all("backend='hybrid'" in message for message in told)
