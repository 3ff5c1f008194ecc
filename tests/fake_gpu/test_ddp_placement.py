"""Where parameters and gradients may be, over the fakes: on one GPU, which is the one of the group where it has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.arrays.devices import device_of
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.ddp_worlds import LANES, world
from tests.unit.ddp.model import Plain


def test_parameters_on_several_devices_are_named_before_anything_moves(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        here, host = cupy.asarray(np.zeros(2)), np.zeros(2)
        with cupy.cuda.Device(5):
            there = cupy.asarray(np.zeros(2))
        with pytest.raises(TensorMismatchError, match="'a' on GPU 0, 'c' on the host"):
            ferrorpc.GradientSynchronizer({"a": here, "b": here, "c": host}, group)
        with pytest.raises(TensorMismatchError, match="'a' on GPU 0, 'b' on GPU 5"):
            ferrorpc.DistributedDataParallel(Plain(a=here, b=there), group)
        sync = ferrorpc.GradientSynchronizer({"a": here, "b": here}, group)
        with pytest.raises(TensorMismatchError, match="gradient 'b' is on the host, but its bucket is on GPU 0"):
            sync({"a": here, "b": host})
        module = Plain(a=here)
        ddp = ferrorpc.DistributedDataParallel(module, group)
        module["a"].grad = there
        with pytest.raises(TensorMismatchError, match="the gradient of 'a' is on GPU 5, but its bucket is on GPU 0"):
            ddp.sync_gradients()
        assert cupy.asnumpy(sync({"a": here, "b": here})["a"]).tolist() == [0.0, 0.0]

    world(cupy, "simulated", 1, body)


def on_two_gpus(cupy: StandIn) -> tuple[Any, Any]:
    """An array on this rank's GPU, and one on another."""
    here = cupy.asarray(np.ones(2, np.float32))
    with cupy.cuda.Device(5):
        return here, cupy.asarray(np.ones(2, np.float32))


@pytest.mark.parametrize("lanes", LANES)
def test_what_is_advised_for_parameters_on_several_gpus_works_in_the_group(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        here, there = on_two_gpus(cupy)
        with pytest.raises(TensorMismatchError) as refused:
            ferrorpc.GradientSynchronizer({"a": here, "b": there}, group)
        if lanes == "simulated":
            assert "a synchroniser of its own" in str(refused.value)
            for each in (here, there):
                assert cupy.asnumpy(ferrorpc.GradientSynchronizer({"a": each}, group)({"a": each})["a"]).tolist() == [1.0] * 2
        else:
            assert f"move all to GPU {here.device.id}" in str(refused.value)
            assert "synchroniser" not in str(refused.value)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", LANES[1:])
def test_what_is_made_of_arrays_on_another_gpu_than_the_groups_is_refused_and_the_group_stays_open(
    cupy: StandIn, lanes: str
) -> None:
    class Buffered(Plain):
        def named_buffers(self) -> list[tuple[str, Any]]:
            return [("running", there)]

    def body(group: ProcessGroup) -> None:
        for make in (
            lambda: ferrorpc.GradientSynchronizer({"a": there}, group),
            lambda: ferrorpc.DistributedDataParallel(Plain(a=there), group, init_sync=False),
            lambda: ferrorpc.DistributedDataParallel(Buffered(a=np.ones(2)), group, init_sync=False),
            lambda: ferrorpc.ZeroOptimizer({"a": there}, group, ferrorpc.rules.SGD(0.5)),
        ):
            with pytest.raises(TensorMismatchError, match=r"on GPU 5, but this rank's communicator is on GPU \d"):
                make()
        group.barrier()

    _, there = on_two_gpus(cupy)
    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("weight", [None, 1.0])
@pytest.mark.parametrize("kind", ["nccl", "simulated"])
def test_a_gradient_made_in_another_stream_may_be_dropped_at_once(
    cupy: StandIn, kind: str, weight: float | None, in_parts: bool
) -> None:
    """Its memory returns in the order of the stream that made it, which does not wait for the one that reads it."""

    def body(group: ProcessGroup) -> list[float]:
        device, n = device_of(cupy, group.rank), 64
        maker, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        sync = ferrorpc.GradientSynchronizer({"w": cupy.asarray(np.zeros(n, np.float32))}, group)
        with sync.step(weight) as step:
            with maker:
                gradient = cupy.asarray(np.full(n, 1.0 + group.rank, np.float32))
                made = device.adopt(maker).record()
            with reader:
                device.adopt(reader).wait(made)
                if in_parts:
                    step.add("w", gradient)
                step.ready("w", None if in_parts else gradient)
            del gradient
            maker.fake.synchronize()
        found: list[float] = cupy.asnumpy(step.grads["w"]).tolist()
        return found

    assert world(cupy, kind, 2, body) == [[1.5] * 64] * 2


@pytest.mark.parametrize("kind", ["nccl", "simulated"])
def test_a_step_is_refused_whose_buffer_has_left_its_gpu_and_the_next_one_is_taken(cupy: StandIn, kind: str) -> None:
    class Buffered(Plain):
        buffer: Any

        def named_buffers(self) -> list[tuple[str, Any]]:
            return [("buffer", self.buffer)]

    def body(group: ProcessGroup) -> list[float]:
        module = Buffered(w=cupy.asarray(np.ones(4, np.float32)))
        module.buffer = on_gpu = cupy.asarray(np.full(3, 1.0 + group.rank, np.float32))
        ddp = ferrorpc.DistributedDataParallel(module, group)
        module["w"].grad = cupy.asarray(np.ones(4, np.float32))
        module.buffer = np.ones(3, np.float32)
        with pytest.raises(TensorMismatchError, match="buffer 'buffer' is elsewhere, but was on this rank's GPU"):
            ddp.sync_gradients()
        module.buffer = on_gpu
        on_gpu += 1
        ddp.sync_gradients()
        found: list[float] = cupy.asnumpy(on_gpu).tolist()
        return found

    assert world(cupy, kind, 2, body) == [[2.0] * 3] * 2


@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_was_computed_in_a_place_counts_once_and_is_not_lost(cupy: StandIn, dtype: Any, weight: float | None) -> None:
    def body(group: ProcessGroup) -> list[list[float]]:
        sync = ferrorpc.GradientSynchronizer({"a": cupy.asarray(np.zeros((2, 2), dtype))}, group)
        ones, found = cupy.asarray(np.ones((2, 2), dtype)), []
        for parts in range(3):
            with sync.step(weight) as step:
                place = step.place("a")
                np.add(ones, ones, out=place)
                if parts:
                    step.add("a", place)
                for _ in range(parts):
                    step.add("a", ones)
                refused = [place] if parts else [ones, None]
                for given in refused:
                    with pytest.raises(UsageError, match=r"'a' (lies in the place of 'a'|was to be computed in its place)"):
                        step.ready("a", given)
                step.ready("a", None if parts else place)
            found.append(cupy.asnumpy(step.grads["a"]).ravel().tolist())
        return found

    assert world(cupy, "hybrid", 2, body) == [[[2.0] * 4, [3.0] * 4, [4.0] * 4]] * 2


@pytest.mark.parametrize("how", ["add the part", "add the place", "pass the place", "ready alone"])
def test_what_a_stream_computes_in_a_place_comes_before_what_others_do_with_it(cupy: StandIn, how: str) -> None:
    """Also where what the stream does takes long, and the gradient is called ready in another one."""

    def body(group: ProcessGroup) -> list[float]:
        sync = ferrorpc.GradientSynchronizer({"a": cupy.asarray(np.zeros(64, np.float32))}, group)
        side, released = cupy.cuda.Stream(non_blocking=True), list[bool]()
        given = cupy.asarray(np.full(64, 1.0 + group.rank, np.float32))
        cupy.cuda.get_current_stream().synchronize()
        with sync.step() as step:
            place = None if how == "add the part" else step.place("a")
            with side:
                side.fake.enqueue(lambda: bool(released))
                computed = np.add(given, given) if place is None else np.add(given, given, out=place)
                if how.startswith("add"):
                    step.add("a", computed)
                else:
                    step.ready("a", *([place] if how == "pass the place" else []))
            if how.startswith("add"):
                step.ready("a")
            for _ in range(50):
                cupy.machine.step()
            released.append(True)
        found: list[float] = cupy.asnumpy(step.grads["a"]).tolist()
        return found

    assert world(cupy, "hybrid", 2, body) == [[3.0] * 64] * 2


def test_a_place_that_is_not_on_the_gpu_of_its_array_is_none_and_the_error_says_so(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        like = {"a": cupy.asarray(np.zeros((4, 4), np.float32))}
        sync = ferrorpc.GradientSynchronizer(like, group, hook=ferrorpc.hooks.PowerSGD(1))
        with sync.step() as step:
            assert step.place("a") is None
            with pytest.raises(UsageError, match=r"(?s)was given no place.*gives None for an array that is not where"):
                step.ready("a")
            step.ready("a", like["a"])

    assert world(cupy, "hybrid", 2, body) == [None] * 2
