"""The CUDA kernels that fold what ranks have laid out: they compile, and compute what their reference in NumPy says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.kernels.cuda.folds import ELEMENTS, FOLDS, OPERATORS
from ferrorpc.kernels.cuda.program import source
from ferrorpc.types import dtype_named
from tests.fake_gpu.compiler import ARITHMETIC, compiled, machine_code
from tests.fake_gpu.folding import check_fold, drawn
from tests.fake_gpu.host_kernels import HostKernels, addresses, build


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """The kernels, compiled as C++ for the host."""
    found = build(tmp_path_factory.mktemp("folds"), FOLDS, source("folds.cu"))
    if found is None:
        pytest.skip("there is no C++20 compiler to run the kernels on the host")
    return found


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_fold_compiles(architecture: str) -> None:
    image = compiled(architecture, text=source("folds.cu"))
    assert sorted(machine_code(image)) == sorted(f".text.{name}" for name in FOLDS)


def test_the_machine_code_does_not_depend_on_how_cupy_or_its_user_compiles_arithmetic() -> None:
    text = source("folds.cu")
    assert machine_code(compiled("sm_90", *ARITHMETIC, text=text)) == machine_code(compiled("sm_90", text=text))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("skip", [0, 1])
def test_a_fold_has_the_bits_of_its_reference(folds: HostKernels, operator: str, element: str, skip: int) -> None:
    """Aligned, so that 16 bytes are read at a time, and not."""
    storage = dtype_named(element).storage
    for ranks, count, divisor in [(1, 3, 1.0), (2, 77, 2.0), (3, 301, 3.0)]:
        arrays = [drawn(element, count, rank) for rank in range(ranks)]
        memory: list[Any] = [aligned(64 + array.nbytes) for array in arrays]
        for place, array in zip(memory, arrays, strict=True):
            place[64:] = array.view(np.uint8)
        room = aligned((count + skip) * storage.itemsize)
        out, by = room[skip * storage.itemsize :], divisor if operator == "sum" else 1.0
        # A double travels as the integer of its bits: arguments are pointers, floats and integers.
        bits = int(np.float64(by).view(np.int64))
        folds.run(f"fold_{operator}_{element}", (2, 1), 8, np.array(addresses(memory), np.uint64), ranks, 64, count, out, bits)
        check_fold(out.view(storage), arrays, operator, element, by)


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Zeros that begin at a multiple of 16 bytes."""
    room = np.zeros(nbytes + 16, np.uint8)
    skip = -room.ctypes.data % 16
    return room[skip : skip + nbytes]
