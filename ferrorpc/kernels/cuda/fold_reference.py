"""The reference implementation of folds.cu in NumPy. The kernels give the same bits, except for the bits of NaN results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.cuda.reference import narrowed, widened
from ferrorpc.types import dtype_named

Array = np.ndarray[Any, Any]

_OPERATORS: Final[dict[str, Any]] = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


def folded(arrays: Sequence[Array], operator: str, element: str, divisor: float) -> Array:
    """The left fold of arrays of a storage dtype, divided by `divisor` if elements are floats, rounded once."""
    dtype = dtype_named(element)
    wide = [widened(array, dtype) if dtype.is_half else array for array in arrays]
    with np.errstate(all="ignore"):
        total: Array = reduce(_OPERATORS[operator], wide[1:], wide[0])
        if total.dtype.kind == "f" and divisor != 1:
            total = total / total.dtype.type(divisor)
        return narrowed(total, dtype) if dtype.is_half else total
