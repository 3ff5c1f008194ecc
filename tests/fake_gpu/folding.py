"""What kernels are given to fold, and whether they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.testing.gpu import reference
from ferrorpc.types import dtype_named

Array = np.ndarray[Any, Any]
AWKWARD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, 1.0, 65520.0, 6e-8], np.float64)


def drawn(element: str, count: int, rank: int) -> Array:
    """Values of every kind, in storage dtype."""
    storage, chance = dtype_named(element).storage, np.random.default_rng(rank)
    if element == "bfloat16" or storage.kind in "iu":
        return chance.integers(0, 256, count * storage.itemsize, np.uint8).view(storage)
    values = chance.standard_normal(count)
    values[: AWKWARD.size] = np.roll(AWKWARD, rank)[: values[: AWKWARD.size].size]
    with np.errstate(all="ignore"):
        return values.astype(storage)


def check_fold(found: Array, arrays: Sequence[Array], operator: str, element: str, divisor: float) -> None:
    """Raises AssertionError unless it has the reference's bits. Which NaN it is is not defined, nor which zero is greater."""
    wanted = reference.folded(arrays, operator, element, divisor)
    if element == "bfloat16":
        found, wanted = ((each.astype(np.uint32) << 16).view(np.float32) for each in (found, wanted))
    np.testing.assert_array_equal(found, wanted)
    same = ~np.isnan(wanted) if wanted.dtype.kind == "f" else np.ones(wanted.shape, bool)
    if operator in ("max", "min"):
        same &= wanted != 0
    assert found[same].tobytes() == wanted[same].tobytes()
