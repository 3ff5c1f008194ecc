"""Weights, buffers and shared-out optimizers of CuPy arrays, over the fakes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ferrorpc
from ferrorpc.errors import CollectiveMismatchError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.ddp_worlds import LANES, Array, on_gpu, world
from tests.fake_gpu.worlds import host_lanes
from tests.unit.ddp.model import Plain


@pytest.mark.parametrize("lanes", LANES)
def test_first_weights_and_buffers_on_gpus_are_the_roots_and_nccl_moves_them_without_the_host(
    cupy: StandIn, lanes: str
) -> None:
    copied: list[int] = []
    cupy.machine.copying = lambda direction, gpu, size_bytes: not copied.append(size_bytes)
    chance = np.random.default_rng(3)
    roots = {
        "single": chance.standard_normal((40, 30)).astype(np.float32),
        "half": chance.standard_normal(300).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 2)),
        "strided": chance.standard_normal((20, 6)),
    }

    def body(group: ProcessGroup) -> Any:
        mine = on_gpu(cupy, {name: array if group.rank == 1 else np.zeros_like(array) for name, array in roots.items()})
        mine["strided"] = mine["strided"].T
        ddp = ferrorpc.DistributedDataParallel(Plain(**mine), group, init_sync=False)
        before = [parameter.data.data.ptr for parameter in ddp.parameters()]
        ddp.broadcast_parameters(root=1)
        assert [parameter.data.data.ptr for parameter in ddp.parameters()] == before
        return {name: cupy.asnumpy(parameter.data).tobytes() for name, parameter in ddp.named_parameters()}

    wanted = {name: (array.T if name == "strided" else array).tobytes() for name, array in roots.items()}
    assert world(cupy, lanes, 3, body) == [wanted] * 3
    assert (sum(copied) >= sum(array.nbytes for array in roots.values())) == (lanes == "simulated")


@pytest.mark.parametrize("lanes", LANES)
def test_weights_that_drifted_apart_on_gpus_are_found(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        module = Plain(**on_gpu(cupy, {"a": np.zeros(3, np.float32), "b": np.zeros(3, ml_dtypes.bfloat16)}))
        ddp = ferrorpc.DistributedDataParallel(module, group, check_every=1)
        module["a"].grad = cupy.asarray(np.ones(3, np.float32))
        ddp.sync_gradients()
        ddp.check_weights()
        if group.rank == 1:
            module["b"].data[...] = 1
        with pytest.raises(CollectiveMismatchError, match="first in 'b'"):
            ddp.sync_gradients()

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize(
    ("mode", "expected"), [("broadcast", [[1, 2]] * 2), ("mean", [[1.5, 2]] * 2), ("local", [[1, 2], [2, 3]])]
)
@pytest.mark.parametrize("lanes", LANES)
def test_buffers_on_gpus_travel_with_each_step(cupy: StandIn, lanes: str, mode: str, expected: list[list[float]]) -> None:
    class Buffered(Plain):
        def __init__(self) -> None:
            super().__init__(w=cupy.asarray(np.zeros(2)))
            self.running, self.count = cupy.asarray(np.zeros(1)), cupy.asarray(np.zeros((), np.int64))

        def named_buffers(self) -> list[tuple[str, Any]]:
            return [("running", self.running), ("count", self.count)]

    def body(group: ProcessGroup) -> Any:
        module = Buffered()
        ddp = ferrorpc.DistributedDataParallel(module, group, buffers=mode)
        module["w"].grad = cupy.asarray(np.ones(2))
        module.running += 1.0 + group.rank
        module.count += 2 + group.rank
        ddp.sync_gradients()
        return [float(module.running[0]), int(module.count)]

    assert world(cupy, lanes, 2, body) == expected


@pytest.mark.parametrize("lanes", LANES)
def test_an_optimizer_that_is_shared_out_updates_weights_on_gpus(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> Any:
        weights = on_gpu(cupy, {"a": np.ones(5, np.float32), "b": np.ones((2, 2), np.float32)})
        optimizer = ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.SGD(0.5))
        optimizer.step({"a": cupy.asarray(np.full(5, 2.0 * group.rank, np.float32)), "b": None})
        return [cupy.asnumpy(each).ravel().tolist() for each in weights.values()]

    assert world(cupy, lanes, 2, body) == [[[0.5] * 5, [1.0] * 4]] * 2


@pytest.mark.parametrize("parts", [(slice(4), slice(3, None)), (slice(None, None, 2), slice(2, None, 2))])
@pytest.mark.parametrize("lanes", LANES)
def test_weights_of_an_optimizer_that_share_memory_of_a_gpu_are_refused(
    cupy: StandIn, lanes: str, parts: tuple[slice, slice]
) -> None:
    def body(group: ProcessGroup) -> None:
        whole = cupy.asarray(np.zeros(8, np.float32))
        weights = {name: whole[part] for name, part in zip("ab", parts, strict=True)}
        with pytest.raises(ferrorpc.UsageError, match="'a' and 'b' share memory"):
            ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.SGD(0.5))
        apart = {"even": whole[::2], "odd": whole[1::2]}
        ferrorpc.ZeroOptimizer(apart, group, ferrorpc.rules.SGD(0.5)).step({"even": None, "odd": None})

    world(cupy, lanes, 1, body)


@pytest.mark.parametrize("cap_mb", [25, 1e-3])
@pytest.mark.parametrize("lanes", LANES)
def test_an_optimizer_on_gpus_has_the_bits_of_the_host_where_only_shares_go_by_nccl(
    cupy: StandIn, lanes: str, cap_mb: float
) -> None:
    shapes = {"a": (70, 10), "b": (333,), "none": (0,), "c": (9, 2, 5)}
    copied: list[int] = []
    cupy.machine.copying = lambda direction, gpu, size_bytes: not copied.append(size_bytes)

    def steps(group: ProcessGroup, place: Callable[[Any], Any], home: Callable[[Any], Array]) -> list[bytes]:
        chance = np.random.default_rng(7)
        weights = {name: place(chance.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
        optimizer = ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.Adam(0.1), bucket_cap_mb=cap_mb)
        chance = np.random.default_rng([group.rank, 8])
        copied.clear()
        for number in range(2):
            grads: dict[str, Any] = {name: chance.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            if number:  # a gradient that is on the host all the same
                grads = {name: place(grad) if name != "b" else grad for name, grad in grads.items()}
            else:
                grads = {name: place(grad) for name, grad in grads.items()} | {"c": None}
            optimizer.step(grads)
        return [home(each).tobytes() for each in weights.values()]

    wanted = run_groups([ProcessGroup(each) for each in host_lanes(2)], lambda group: steps(group, np.asarray, np.asarray))
    assert world(cupy, lanes, 2, lambda group: steps(group, cupy.asarray, cupy.asnumpy)) == wanted
    everything = 4 * sum(math.prod(shape) for shape in shapes.values())
    assert (sum(copied) < 2 * 2 * 2.5 * everything) == (lanes != "simulated")


@pytest.mark.parametrize("lanes", LANES)
def test_what_ranks_with_gpus_remember_is_gathered_on_the_host_and_goes_on(cupy: StandIn, lanes: str) -> None:
    shapes = {"a": (7, 10), "b": (333,), "c": (9, 2, 5)}

    def steps(group: ProcessGroup, place: Callable[[Any], Any], home: Callable[[Any], Array]) -> list[bytes]:
        chance = np.random.default_rng(7)
        weights = {name: place(chance.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
        state: Any = None
        for cap_mb in (25, 1e-3):
            optimizer = ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.Adam(0.1), bucket_cap_mb=cap_mb)
            if state is not None:
                optimizer.load_state(state)
            optimizer.step({name: place(chance.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()})
            state = [optimizer.gather_state(root) for root in range(group.size)][group.rank]
        return [each.tobytes() for each in state.values()] + [home(each).tobytes() for each in weights.values()]

    wanted = run_groups([ProcessGroup(each) for each in host_lanes(2)], lambda group: steps(group, np.asarray, np.asarray))
    assert world(cupy, lanes, 2, lambda group: steps(group, cupy.asarray, cupy.asnumpy)) == wanted


def test_an_optimizer_may_be_used_and_dropped_in_another_stream_than_it_was_made_in(cupy: StandIn) -> None:
    """The other one is late: its buffers are not cleared yet when the step writes to them, and are not free before it has read
    them."""
    looks = itertools.count()
    begun: list[int] = []

    def body(group: ProcessGroup) -> Any:
        first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        weights = on_gpu(cupy, {"w": np.ones(500, np.float32)})
        gradients = on_gpu(cupy, {"w": np.full(500, 2, np.float32)})
        cupy.cuda.get_current_stream().synchronize()
        first.fake.enqueue(lambda: bool(begun) or next(looks) > 500)
        cupy.machine.copying = lambda direction, gpu, size_bytes: bool(begun.append(gpu) or not first.fake.tasks)
        with first:
            optimizer = ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.SGD(0.25), init_sync=False)
        with second:
            optimizer.step(gradients)
            del optimizer
        for _ in range(3):
            cupy.machine.step()
        with second:
            return cupy.asnumpy(weights["w"]).tolist()

    assert world(cupy, "simulated", 1, body) == [[0.5] * 500]
