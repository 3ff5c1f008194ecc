"""The launcher of the CUDA kernels: what it launches, with which arguments; the kernels themselves run on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.group import ProcessGroup
from ferrorpc.kernels.cuda.launcher import PEERS, ROWS, DeviceKernels
from ferrorpc.kernels.cuda.program import KERNELS, OPTIONS, source
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu import reference
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import DType
from tests.fake_gpu.host_kernels import HostKernels
from tests.fake_gpu.shared_worlds import ipc_backends


class RawModule:
    """`cupy.RawModule` whose functions are the kernels compiled for the host; a fake GPU's memory is the host's."""

    kernels: HostKernels
    cupy: StandIn

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        assert (code, options) == (source(), OPTIONS)

    def compile(self) -> None:
        """It was compiled for the host before."""

    def get_function(self, name: str) -> Any:
        assert name in KERNELS

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            assert all(
                isinstance(each, self.cupy.ndarray | np.int64 | np.int32 | np.float32) or each.size == 1 for each in arguments
            )
            ready = [np.uint64(each.data.ptr) if isinstance(each, self.cupy.ndarray) else each.copy() for each in arguments]

            def run() -> bool:
                self.kernels.run(
                    name, (min(grid[0], 2), 1), 32, *(each if each.dtype.kind == "V" else each.item() for each in ready)
                )
                return True

            self.cupy.stream.enqueue(run)

        return launch


def floats(count: int, salt: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(salt).standard_normal(count).astype(np.float32)


@pytest.fixture(params=["compiled", "stand-in"])
def launcher(cupy: StandIn, request: pytest.FixtureRequest) -> DeviceKernels:
    """Over the kernels themselves, and over what the stand-in for CuPy has in their place."""
    if request.param == "compiled":
        kernels = request.getfixturevalue("kernels")
        cupy.RawModule = type("RawModule", (RawModule,), {"kernels": kernels, "cupy": cupy})
    return DeviceKernels(cupy)


def test_gradients_go_into_a_bucket_of_half_the_size_and_back(cupy: StandIn, launcher: DeviceKernels) -> None:
    grads = [floats(count, count) for count in (5, 0, 1000)]
    starts = [0, 5, 8]
    bucket = cupy.asarray(np.zeros(1010, np.uint16))
    launcher.pack([cupy.asarray(grad) for grad in grads], starts, bucket, DType.FLOAT32, DType.BFLOAT16, 0.5)
    expected = np.zeros(1010, np.uint16)
    reference.pack(grads, starts, expected, DType.FLOAT32, DType.BFLOAT16, 0.5)
    assert cupy.asnumpy(bucket).tobytes() == expected.tobytes()
    found = [cupy.asarray(np.zeros_like(grad)) for grad in grads]
    launcher.unpack(found, starts, bucket, DType.BFLOAT16, DType.FLOAT32, 2.0)
    wanted = [np.zeros_like(grad) for grad in grads]
    reference.unpack(wanted, starts, expected, DType.BFLOAT16, DType.FLOAT32, 2.0)
    for one, other in zip(found, wanted, strict=True):
        assert cupy.asnumpy(one).tobytes() == other.tobytes()


def test_more_gradients_than_a_launch_is_told_of_are_packed_by_several(cupy: StandIn, launcher: DeviceKernels) -> None:
    grads = [floats(salt % 4, salt) for salt in range(3 * ROWS)]
    starts = [4 * salt for salt in range(3 * ROWS)]
    bucket = cupy.asarray(np.zeros(12 * ROWS, np.float32))
    launcher.pack([cupy.asarray(grad) for grad in grads], starts, bucket, DType.FLOAT32, DType.FLOAT32)
    expected = np.zeros(12 * ROWS, np.float32)
    reference.pack(grads, starts, expected, DType.FLOAT32, DType.FLOAT32, 1.0)
    np.testing.assert_array_equal(cupy.asnumpy(bucket), expected)


def test_blocks_of_int8_there_and_back(cupy: StandIn, launcher: DeviceKernels) -> None:
    values = floats(600, 1)
    scales, integers = (cupy.asarray(np.zeros(count, dtype)) for count, dtype in ((3, np.float32), (600, np.int8)))
    launcher.quantise_int8(cupy.asarray(values), scales, integers)
    expected = reference.quantise_int8(values)
    assert cupy.asnumpy(scales).tobytes() == expected[0].tobytes()
    assert cupy.asnumpy(integers).tobytes() == expected[1].tobytes()
    back = cupy.asarray(np.zeros(600, np.float32))
    launcher.dequantise_int8(scales, integers, back)
    assert cupy.asnumpy(back).tobytes() == reference.dequantise_int8(*expected).tobytes()


@pytest.mark.parametrize("divisor", [1, 3, 0.7])
def test_peers_are_summed(cupy: StandIn, launcher: DeviceKernels, divisor: float) -> None:
    peers = [reference.narrowed(floats(300, salt), DType.FLOAT16) for salt in range(3)]
    out = cupy.asarray(np.zeros(300, np.float16))
    launcher.sum_peers([cupy.asarray(peer) for peer in peers], out, DType.FLOAT16, divisor)
    assert cupy.asnumpy(out).tobytes() == reference.sum_peers(peers, DType.FLOAT16, divisor).tobytes()


def test_more_peers_than_a_launch_is_told_of_are_summed(cupy: StandIn, launcher: DeviceKernels) -> None:
    peers = [floats(3, salt) for salt in range(PEERS + 2)]
    there = [cupy.asarray(peer) for peer in peers]
    launcher.sum_peers(there, there[-1], DType.FLOAT32)
    assert cupy.asnumpy(there[-1]).tobytes() == reference.sum_peers(peers, DType.FLOAT32).tobytes()


@pytest.mark.parametrize("damage", [0.0, np.inf, np.nan])
def test_what_was_not_delivered_is_kept_unless_it_is_damaged(cupy: StandIn, launcher: DeviceKernels, damage: float) -> None:
    values, delivered = floats(3000, 1) * np.float32(1e-38), floats(3000, 2) * np.float32(1e-38)
    values[2900] += np.float32(damage)
    there = cupy.asarray(values)
    launcher.residue(there, cupy.asarray(delivered))
    assert cupy.asnumpy(there).tobytes() == reference.residue(values, delivered).tobytes()
    assert reference.residue(values, delivered).any() == (damage == 0)


def test_nothing_is_launched_for_nothing(cupy: StandIn, launcher: DeviceKernels) -> None:
    empty = cupy.asarray(np.zeros(0, np.float32))
    launcher.pack([empty], [0], empty, DType.FLOAT32, DType.FLOAT32)
    launcher.quantise_int8(empty, empty, cupy.asarray(np.zeros(0, np.int8)))
    launcher.dequantise_int8(empty, cupy.asarray(np.zeros(0, np.int8)), empty)
    launcher.sum_peers([empty], empty, DType.FLOAT32)
    launcher.residue(empty, empty)
    cupy.machine.settle()
    assert launcher._kernel.cache_info().currsize == 0


@pytest.mark.shared_memory
def test_kernels_are_compiled_before_an_operation_that_a_deadline_bounds(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds where CuPy's cache on disk is empty, as in a new container."""
    compiled: list[Any] = []
    monkeypatch.setattr(cupy.RawModule, "compile", lambda module: compiled.append(module))
    with ipc_backends(cupy, 2) as backends:
        folds = len(compiled)
        assert folds

        def body(group: ProcessGroup) -> None:
            ferrorpc.GradientSynchronizer({"w": cupy.zeros(5, np.float32)}, group)

        run_groups([ProcessGroup(backend) for backend in backends], body)
        assert len(compiled) > folds
