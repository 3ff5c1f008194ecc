"""The contract suite on arrays of a real GPU, which all ranks share, by every way that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.device.communicator import reduction
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.backends.nccl.choose import open_nccl
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import BackendContract, run_groups
from ferrorpc.testing.reference import operators
from ferrorpc.types import DType, ReduceOp
from tests.fake_gpu.on_gpu import Cupy, Library, OnGpu, Tensors
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.worlds import host_lanes
from tests.gpu.without import skip_without_gpu

skip_without_gpu()
pytestmark = pytest.mark.gpu


class OnDevice(BackendContract):
    """Every array is on the GPU."""

    @pytest.fixture(autouse=True)
    def _with(self, cupy: Any) -> None:
        self.cupy = cupy

    def on_device(self, groups: list[ProcessGroup], fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        """fn on every rank, with a group that puts every array on the GPU first."""

        def body(group: ProcessGroup) -> Any:
            with self.cupy.cuda.Device(0), self.stream():
                stand_for: Any = OnGpu(group, self.library())
                return fn(stand_for)

        return run_groups(groups, body)

    def stream(self) -> Any:
        """A context in which one of the arrays' library is current."""
        return self.cupy.cuda.Stream(non_blocking=True)

    def library(self) -> Library:
        """Whose arrays they are."""
        return Cupy(self.cupy)


class TestStaged(OnDevice):
    """By the host lanes, bit for bit as host arrays."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return self.on_device([ProcessGroup(lanes) for lanes in host_lanes(size)], fn)


class TestShared(OnDevice):
    """Ranks that read each other's GPU memory; as threads of one process, they have it open already."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with ipc_backends(self.cupy, size, apart=False) as backends:
            return self.on_device([ProcessGroup(backend) for backend in backends], fn)


class TestHybridAlone(OnDevice):
    """NCCL with one rank; two on one GPU it refuses."""

    in_rank_order = False
    kind: type[DeviceBackend] = HybridBackend

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        if size > 1:
            pytest.skip("NCCL takes one rank a GPU")
        return self.on_device([ProcessGroup(self.kind(host_lanes(1)[0], device_of(self.cupy, 0), open_nccl()))], fn)


class OnTensors(OnDevice):
    """Every array is a tensor of torch's, in streams of torch's own."""

    @pytest.fixture(autouse=True)
    def _with_torch(self) -> None:
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("torch sees no GPU")

    def stream(self) -> Any:
        import torch

        return torch.cuda.stream(torch.cuda.Stream())

    def library(self) -> Library:
        return Tensors("cuda:0")


class TestStagedTensors(OnTensors, TestStaged):
    """By the host lanes."""


class TestSharedTensors(OnTensors, TestShared):
    """Ranks that read each other's GPU memory."""


class TestHybridAloneOnTensors(OnTensors, TestHybridAlone):
    """NCCL with one rank."""


class TestNcclAlone(TestHybridAlone):
    """Everything by NCCL."""

    kind = NcclBackend

    def operators(self, dtype: DType) -> list[ReduceOp]:
        return [op for op in operators(dtype) if reduction(op, dtype) is not None]
