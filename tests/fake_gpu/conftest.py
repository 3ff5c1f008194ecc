"""Fake GPUs for tests: none of these tests needs a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrorpc.kernels.cuda.program import KERNELS
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import StandIn, stand_in
from tests.fake_gpu.host_kernels import HostKernels, build


@pytest.fixture
def cupy() -> Iterator[StandIn]:
    """A stand-in for CuPy on a machine of eight GPUs; what its GPUs met that they should not have fails the test."""
    with stand_in(Machine(8)) as module:
        yield module


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """The CUDA kernels, compiled as C++ for the host."""
    found = build(tmp_path_factory.mktemp("kernels"), KERNELS)
    if found is None:
        pytest.skip("there is no C++20 compiler to run the kernels on the host")
    return found


@pytest.fixture
def launched_within_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a call waits for NCCL's launch."""
    monkeypatch.setattr("ferrorpc.backends.device.launch_queue.LAUNCH_SECONDS", 20.0)
