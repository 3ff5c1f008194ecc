"""The kernels that fold what ranks have laid out, on a real GPU: the bits of their reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.kernels.cuda.folds import ELEMENTS, OPERATORS
from ferrorpc.types import dtype_named
from tests.fake_gpu.folding import check_fold, drawn
from tests.gpu.without import skip_without_gpu

skip_without_gpu()
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_fold_has_the_bits_of_its_reference(cupy: Any, operator: str, element: str) -> None:
    folds = device_of(cupy, 0).folds
    storage = dtype_named(element).storage
    for ranks, count, skip, divisor in [(1, 5, 0, 1.0), (2, 1000, 3, 2.0), (3, 4099, 0, 3.0), (8, 100_003, 1, 1.0)]:
        arrays = [drawn(element, count, rank) for rank in range(ranks)]
        bases = [cupy.asarray(np.concatenate([np.zeros(64, np.uint8), array.view(np.uint8)])) for array in arrays]
        out = cupy.zeros(count + skip, storage)
        target, by = out.data.ptr + skip * storage.itemsize, divisor if operator == "sum" else 1.0
        table = folds.table([base.data.ptr for base in bases])
        folds.fold(f"fold_{operator}_{element}", table, 64, count, arrays[0].nbytes, target, by)
        check_fold(cupy.asnumpy(out)[skip:], arrays, operator, element, by)
