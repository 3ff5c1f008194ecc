"""The contract suite with torch's tensors on fake GPUs: what holds for CuPy's arrays holds for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ferrorpc.backends.base import Backend
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import BackendContract, run_groups
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import stand_in
from tests.fake_gpu.on_gpu import OnGpu, Tensors
from tests.fake_gpu.test_contract import TestHybrid as Hybrid
from tests.fake_gpu.torch_gpu import DEVICE, TorchGpus, torch_on
from tests.fake_gpu.worlds import host_lanes, nccl_backends

World = Callable[[ProcessGroup], Any]


class TestHybridOnTensors(Hybrid):
    """By NCCL, or by the host lanes where NCCL has nothing."""

    largest_world = 3
    in_rank_order = False

    def world(self, size: int, fn: World) -> list[Any]:
        with stand_in(Machine(size)) as cupy, torch_on(cupy) as gpus:
            return with_tensors(gpus, nccl_backends(cupy, size, kind=HybridBackend), fn)


class TestStagedTensors(BackendContract):
    """Through pinned memory and the host lanes."""

    largest_world = 3

    def world(self, size: int, fn: World) -> list[Any]:
        with stand_in(Machine(size)) as cupy, torch_on(cupy) as gpus:
            return with_tensors(gpus, host_lanes(size), fn)


def with_tensors(gpus: TorchGpus, backends: Sequence[Backend], fn: World) -> list[Any]:
    """fn on every rank, with a group that puts every array on the rank's GPU first, as a tensor in a stream of torch's own."""

    def body(group: ProcessGroup) -> Any:
        with gpus.cupy.cuda.Device(group.rank), gpus.on(gpus.cupy.machine.gpus[group.rank].new_stream()):
            stand_for: Any = OnGpu(group, Tensors(f"{DEVICE}:{group.rank}"))
            return fn(stand_for)

    return run_groups([ProcessGroup(backend) for backend in backends], body)
