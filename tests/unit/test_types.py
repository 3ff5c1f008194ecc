"""The dtype table and the op x dtype table."""

from typing import Any

import numpy as np
import pytest

from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, ReduceOp, as_dtype, dtype_named, dtype_of, refusal


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.label)
def test_every_dtype_has_its_own_storage_of_the_same_size(dtype: DType) -> None:
    assert dtype.itemsize == dtype.storage.itemsize
    if dtype is not DType.BFLOAT16:
        assert dtype_of(dtype.storage) is dtype
    assert dtype_named(dtype.label) is dtype


def test_bfloat16_of_ml_dtypes_is_known_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert dtype_of(np.dtype(ml_dtypes.bfloat16)) is DType.BFLOAT16


def test_none_is_no_dtype_although_numpy_takes_it_for_float64() -> None:
    with pytest.raises(TensorMismatchError):
        as_dtype(None)


@pytest.mark.parametrize("spelling", [">f4", "O", "U3", "M8[s]", "V8"])
def test_other_dtypes_are_refused_with_the_list(spelling: str) -> None:
    with pytest.raises(TensorMismatchError, match="float32"):
        dtype_of(np.dtype(spelling))


def test_operators_are_known_by_name() -> None:
    assert ReduceOp.named("mean") is ReduceOp.MEAN
    assert ReduceOp.named(ReduceOp.BXOR) is ReduceOp.BXOR
    with pytest.raises(UsageError, match="avg"):
        ReduceOp.named("avg")


def test_the_table_of_what_fits_together() -> None:
    refused = {(op, dtype) for op in ReduceOp for dtype in DType if refusal(op, dtype)}
    floats = {d for d in DType if d.is_float}
    complexes = {DType.COMPLEX64, DType.COMPLEX128}
    whole = {d for d in DType if d.is_integer} | {DType.BOOL}
    expected = {(ReduceOp.MEAN, d) for d in whole}
    expected |= {(op, d) for op in (ReduceOp.MIN, ReduceOp.MAX) for d in complexes}
    expected |= {(op, d) for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) for d in floats | complexes}
    assert refused == expected


@pytest.mark.parametrize("given", ["float32", "f4", "single", np.float32, np.dtype("f4"), DType.FLOAT32, "torch.float32"])
def test_a_caller_may_name_a_dtype_as_usual(given: Any) -> None:
    assert as_dtype(given) is DType.FLOAT32


@pytest.mark.parametrize("given", [">f4", "float8", "U3", object, "nonsense", ["f4", "f8"], 3])
def test_what_is_no_dtype_is_refused_with_the_list(given: Any) -> None:
    with pytest.raises(TensorMismatchError, match="bfloat16"):
        as_dtype(given)
