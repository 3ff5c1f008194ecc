"""Every operation by NCCL, over the fake."""

from __future__ import annotations

import pytest

from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.operations import every_operation
from tests.fake_gpu.worlds import nccl_backends


@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_operation_takes_and_gives_back_cupy_arrays(cupy: StandIn, size: int, kind: type[DeviceBackend]) -> None:
    groups = [ProcessGroup(backend) for backend in nccl_backends(cupy, size, kind=kind)]
    run_groups(groups, lambda group: every_operation(group, cupy))
