"""The contract suite over the fake: what a group promises also holds where NCCL performs its operations.

On host arrays, which go to the GPU and back. The fake adds in an order of its own, as NCCL does, so sums are compared as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ferrorpc.backends.base import Backend
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.device.communicator import reduction
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import BackendContract, run_groups
from ferrorpc.testing.contract_base import on_some_sizes
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import StandIn, stand_in
from ferrorpc.testing.reference import operators
from ferrorpc.types import DType, ReduceOp
from tests.fake_gpu.on_gpu import Cupy, OnGpu
from tests.fake_gpu.worlds import host_lanes, nccl_backends


class TestNccl(BackendContract):
    """Everything by NCCL."""

    largest_world = 4
    in_rank_order = False

    def operators(self, dtype: DType) -> list[ReduceOp]:
        return [op for op in operators(dtype) if reduction(op, dtype) is not None]

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with stand_in(Machine(size)) as cupy:

            def body(group: ProcessGroup) -> Any:
                with cupy.cuda.Device(group.rank):
                    return fn(group)

            return run_groups([ProcessGroup(backend) for backend in nccl_backends(cupy, size)], body)

    @on_some_sizes
    @pytest.mark.parametrize("wire", ["bf16"])
    def test_compressed_sums_are_close_and_the_same_on_every_rank(self, size: int, wire: str) -> None:
        """NCCL compresses nothing, and says so; the group stays open."""

        def body(group: ProcessGroup) -> None:
            with pytest.raises(UsageError, match="compresses nothing"):
                group.all_reduce(1.0, wire=wire)
            group.barrier()

        self.world(size, body)

    @on_some_sizes
    @pytest.mark.parametrize("algorithm", ["ring"])
    def test_algorithms_by_name_agree_on_whole_numbers(self, size: int, algorithm: str) -> None:
        """NCCL chooses its own."""

        def body(group: ProcessGroup) -> None:
            with pytest.raises(UsageError, match="its own algorithm"):
                group.all_reduce(1.0, algorithm=algorithm)
            group.barrier()

        self.world(size, body)


class TestHybrid(BackendContract):
    """Host arrays in a group that also has NCCL: bit for bit as without it, compression and algorithms included."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with stand_in(Machine(size)) as cupy:
            return run_groups([ProcessGroup(backend) for backend in nccl_backends(cupy, size, kind=HybridBackend)], fn)


class TestNcclOnGpuArrays(TestNccl):
    """The same with arrays that are on the GPU already, in whatever layout."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return on_gpus(NcclBackend, size, fn)


class TestHybridOnGpuArrays(TestHybrid):
    """GPU arrays in a hybrid group: by NCCL, or by the host lanes where NCCL has nothing."""

    largest_world = 4
    in_rank_order = False

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return on_gpus(HybridBackend, size, fn)


class TestStagedGpuArrays(BackendContract):
    """GPU arrays where there is no NCCL: through pinned memory and the host lanes, bit for bit as host arrays."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with stand_in(Machine(size)) as cupy:
            return with_gpu_arrays(cupy, host_lanes(size), fn)


def on_gpus(kind: type[DeviceBackend], size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
    """fn on every rank, with a group that puts every array on the rank's GPU first."""
    with stand_in(Machine(size)) as cupy:
        return with_gpu_arrays(cupy, nccl_backends(cupy, size, kind=kind), fn)


def with_gpu_arrays(cupy: StandIn, backends: Sequence[Backend], fn: Callable[[ProcessGroup], Any]) -> list[Any]:
    """fn on every rank of these backends."""

    def body(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            stand_for: Any = OnGpu(group, Cupy(cupy))
            return fn(stand_for)

    return run_groups([ProcessGroup(backend) for backend in backends], body)
