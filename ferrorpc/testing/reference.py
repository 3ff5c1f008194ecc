"""Reference results of operations, computed in one process by NumPy alone; and comparisons with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from importlib.util import find_spec
from math import prod
from typing import Any, Final

import numpy as np

from ferrorpc.types import DType, ReduceOp, refusal
from ferrorpc.wire.codecs import codec

Array = np.ndarray[Any, Any]

_FOLDS: Final[dict[ReduceOp, Callable[[Array, Array], Array]]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def every_dtype() -> list[DType]:
    """All dtypes that can be tested in this environment: bfloat16 needs ml_dtypes."""
    return [dtype for dtype in DType if dtype is not DType.BFLOAT16 or find_spec("ml_dtypes") is not None]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The dtype of users' arrays."""
    if dtype is DType.BFLOAT16:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return dtype.storage


def values(dtype: DType, shape: int | tuple[int, ...], rank: int, salt: int = 0) -> Array:
    """A new array of random values, which depend only on the arguments."""
    count = shape if isinstance(shape, int) else prod(shape)
    return (_drawn_large if count > _LARGE else _drawn_small)(dtype, shape, rank, salt).copy()


def _drawn(dtype: DType, shape: int | tuple[int, ...], rank: int, salt: int) -> Array:
    chance = np.random.default_rng([rank, salt, int(dtype)])
    target = numpy_dtype(dtype)
    if dtype is DType.BOOL:
        return chance.random(shape) < 0.5
    if dtype.is_integer:
        span = np.iinfo(target)
        return chance.integers(span.min, span.max, shape, target, endpoint=True)
    real = chance.standard_normal(shape)
    if dtype.is_complex:
        return (real + 1j * chance.standard_normal(shape)).astype(target)
    return real.astype(target)


_LARGE: Final = 4096
"""Arrays with more elements are large: fewer of them are cached."""
_drawn_small = lru_cache(4096)(_drawn)
_drawn_large = lru_cache(16)(_drawn)


def reduced(arrays: Sequence[Array], op: ReduceOp, dtype: DType) -> Array:
    """The canonical result: the left fold in rank order. Half types are added in float32; MEAN divides; then one rounding."""
    work = [array.astype(np.float32) for array in arrays] if dtype.is_half else list(arrays)
    with np.errstate(all="ignore"):
        total = reduce(_FOLDS[op], work)
        if op is ReduceOp.MEAN:
            total = divided(total, len(arrays))
        return np.asarray(total).astype(numpy_dtype(dtype))


def divided(total: Array, divisor: float) -> Array:
    """total / divisor; of complex numbers the parts, as NumPy would make the divisor complex, and NaN of infinities."""
    if total.dtype.kind != "c":
        return np.asarray(total / total.dtype.type(divisor))
    parts = np.empty_like(total)
    parts.real, parts.imag = (part / part.dtype.type(divisor) for part in (total.real, total.imag))
    return parts


def worst_rounding(wire: str, arrays: Sequence[Array]) -> float:
    """The largest error of a codec in any of these float32 arrays of one dimension. Where a codec has blocks, and others begin
    elsewhere, theirs is about the same."""
    chosen = codec(wire)
    return max(float(np.abs(chosen.decode(chosen.encode(array), array.size) - array).max()) for array in arrays)


def operators(dtype: DType) -> list[ReduceOp]:
    """The operators that are defined for this dtype."""
    return [op for op in ReduceOp if refusal(op, dtype) is None]


def check_same(found: Any, expected: Array, what: str = "") -> None:
    """Raises AssertionError unless `found` is a NumPy array of the same dtype, shape and bits."""
    if not isinstance(found, np.ndarray):
        raise AssertionError(f"{what}: {type(found).__name__} is no NumPy array")
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise AssertionError(f"{what}: {found.dtype}{found.shape} is not {expected.dtype}{expected.shape}")
    if found.tobytes() != expected.tobytes():
        differ = np.flatnonzero((found != expected).reshape(-1))
        places = f"first at {differ[0]}" if differ.size else "in bits that compare equal"
        raise AssertionError(f"{what}: {differ.size} of {found.size} elements differ, {places}:\n{found!r}\n{expected!r}")


def check_near(found: Any, expected: Array, what: str = "") -> None:
    """Raises AssertionError unless `found` is a NumPy array of the same dtype and shape with the same values up to rounding."""
    if not isinstance(found, np.ndarray) or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise AssertionError(f"{what}: {found!r} is no {expected.dtype}{expected.shape}")
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    bits = {"float16": 10, "bfloat16": 7, "float64": 52, "complex128": 52}.get(expected.dtype.name, 23)
    one, other = found.astype(wide), expected.astype(wide)
    if not np.allclose(one, other, rtol=2.0 ** (4 - bits), atol=2.0 ** (4 - bits), equal_nan=True):
        raise AssertionError(f"{what}: off by more than rounding:\n{found!r}\n{expected!r}")


def check_list(found: Any, expected: Sequence[Array], what: str = "") -> None:
    """As `check_same`, for a list of arrays."""
    if not isinstance(found, list) or len(found) != len(expected):
        raise AssertionError(f"{what}: {found!r} is no list of {len(expected)} arrays")
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        check_same(one, other, f"{what}, item {rank}")
