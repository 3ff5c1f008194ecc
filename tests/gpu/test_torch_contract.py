"""The contract suite with torch's tensors on fake GPUs: what holds for CuPy's arrays holds for them, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ferrorpc.backends.base import Backend
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import BackendContract, run_groups
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import stand_in
from tests.gpu.on_gpu import OnGpu
from tests.gpu.shared_worlds import ipc_backends
from tests.gpu.test_contract import TestHybrid as Hybrid, TestNccl as Nccl
from tests.gpu.torch_gpu import Tensors, TorchGpus, torch_on
from tests.gpu.worlds import host_lanes, nccl_backends

World = Callable[[ProcessGroup], Any]


class TestNcclOnTensors(Nccl):
    """By NCCL."""

    def world(self, size: int, fn: World) -> list[Any]:
        with stand_in(Machine(size)) as cupy, torch_on(cupy) as gpus:
            return with_tensors(gpus, nccl_backends(cupy, size, kind=NcclBackend), fn)


class TestHybridOnTensors(Hybrid):
    """By NCCL, or by the host lanes where NCCL has nothing."""

    in_rank_order = False

    def world(self, size: int, fn: World) -> list[Any]:
        with stand_in(Machine(size)) as cupy, torch_on(cupy) as gpus:
            return with_tensors(gpus, nccl_backends(cupy, size, kind=HybridBackend), fn)


class TestStagedTensors(BackendContract):
    """Through pinned memory and the host lanes."""

    def world(self, size: int, fn: World) -> list[Any]:
        with stand_in(Machine(size)) as cupy, torch_on(cupy) as gpus:
            return with_tensors(gpus, host_lanes(size), fn)


class TestSharedTensors(BackendContract):
    """Among ranks that share a GPU."""

    def world(self, size: int, fn: World) -> list[Any]:
        with stand_in(Machine(1)) as cupy, torch_on(cupy) as gpus, ipc_backends(cupy, size) as backends:
            return with_tensors(gpus, backends, fn, is_shared=True)


def with_tensors(gpus: TorchGpus, backends: Sequence[Backend], fn: World, is_shared: bool = False) -> list[Any]:
    """fn on every rank, with a group that puts every array on the rank's GPU first, as a tensor in a stream of torch's own."""

    def body(group: ProcessGroup) -> Any:
        index = 0 if is_shared else group.rank
        with gpus.cupy.cuda.Device(index), gpus.on(gpus.cupy.machine.gpus[index].new_stream(non_blocking=True)):
            stand_for: Any = OnGpu(group, Tensors(gpus, index))
            return fn(stand_for)

    return run_groups([ProcessGroup(backend) for backend in backends], body)
