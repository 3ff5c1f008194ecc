"""Every operation by NCCL, over the fake; and that a refused one does not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.device import Device
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.operations import every_operation
from tests.fake_gpu.worlds import nccl_backends


@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_operation_takes_and_gives_back_cupy_arrays(cupy: StandIn, size: int, kind: type[DeviceBackend]) -> None:
    groups = [ProcessGroup(backend) for backend in nccl_backends(cupy, size, kind=kind)]
    run_groups(groups, lambda group: every_operation(group, cupy))


@pytest.mark.parametrize("why", ["another GPU", "no memory", "a stream without a name"])
def test_a_refused_operation_leaves_its_rank_in_step_with_the_others(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It has sent nothing, so the next one has its number."""

    def refused(group: ProcessGroup, x: Any) -> None:
        if why == "another GPU":
            with cupy.cuda.Device(5), pytest.raises(TensorMismatchError, match="GPU 5"):
                group.all_gather(cupy.asarray(np.ones(4, np.float32)))
        elif why == "no memory":

            def none(*arguments: Any) -> None:
                raise MemoryError("out of memory")

            with monkeypatch.context() as patch:
                patch.setattr(Device, "empty", none)
                with pytest.raises(MemoryError):
                    group.reduce_scatter([x, x])
        else:
            with cupy.cuda.Stream(ptds=True), pytest.raises(UsageError, match="per-thread"):
                group.all_reduce(x, out=x)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            x = cupy.asarray(np.full(4, group.rank + 1, np.float32))
            group.all_reduce(x, out=cupy.asarray(np.zeros(4, np.float32)))
            group.session.barrier("begun")  # there is memory for what the other rank needs
            if group.rank == 0:
                refused(group, x)
            group.session.barrier("refused")
            found = [cupy.asnumpy(each).tolist() for each in group.all_gather(x, timeout=10.0)]
        assert found == [[1.0] * 4, [2.0] * 4]

    run_groups([ProcessGroup(backend) for backend in nccl_backends(cupy, 2, kind=HybridBackend)], body)


def test_a_rank_without_elements_to_receive_stays_in_step_with_the_others(cupy: StandIn) -> None:
    """It launches nothing for such an operation, unlike the others."""
    groups = [ProcessGroup(backend, timeout=30.0) for backend in nccl_backends(cupy, 3)]

    def body(group: ProcessGroup) -> list[float]:
        with cupy.cuda.Device(group.rank):
            parts = [cupy.asarray(np.ones(count, np.float32)) for count in (2, 0, 1)]
            part = group.scatter(parts if group.rank == 0 else None)
            total = group.all_reduce(cupy.asarray(np.full(1, part.size, np.float32)))
            return cupy.asnumpy(total).tolist()

    assert run_groups(groups, body) == [[3.0]] * 3


def test_what_a_communicator_launches_in_several_streams_runs_in_the_order_of_its_launches(cupy: StandIn) -> None:
    """As of NCCL's, each of whose kernels waits for its communicator's last one: what ranks send cannot cross."""
    groups, busy = [ProcessGroup(backend, timeout=30.0) for backend in nccl_backends(cupy, 2)], [True]

    def body(group: ProcessGroup) -> list[Any]:
        backend: Any = group._backend
        with cupy.cuda.Device(group.rank):
            sources = [cupy.asarray(np.full(4, value, np.float32)) for value in range(2)]
            targets, later = [cupy.empty(4, np.float32) for _ in sources], cupy.cuda.Stream(non_blocking=True)
            cupy.machine.settle()
            group.session.barrier("here")
            if group.rank == 1:
                backend.context.program.stream.own.fake.enqueue(lambda: not busy)
            for x, y, stream in zip(sources, targets, (None, later), strict=True):
                backend.exchange_raw([(x.data.ptr, 16, 1 - group.rank)], [(y.data.ptr, 16, 1 - group.rank)], stream=stream)
            cupy.machine.settle()
            group.session.barrier("launched")
            busy.clear()
            backend.synchronize(SYSTEM_CLOCK.now() + 10.0)
            return [cupy.asnumpy(y).tolist() for y in targets]

    assert run_groups(groups, body) == [[[0.0] * 4, [1.0] * 4]] * 2
