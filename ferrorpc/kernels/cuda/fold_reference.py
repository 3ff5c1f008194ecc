"""The reference implementation of folds.cu in NumPy. The kernels give the same bits, except for the bits of NaN results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.cuda.reference import narrowed, widened
from ferrorpc.types import DType

Array = np.ndarray[Any, Any]

_HALVES: Final = {"float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
_OPERATORS: Final[dict[str, Any]] = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


def storage_of(element: str) -> np.dtype[Any]:
    """The NumPy dtype of an element type; uint16 for bfloat16."""
    return np.dtype("uint16" if element == "bfloat16" else element)


def folded(arrays: Sequence[Array], operator: str, element: str, divisor: float = 1.0) -> Array:
    """The left fold of arrays of a storage dtype, divided by `divisor` if elements are floats, rounded once."""
    half = _HALVES.get(element)
    wide = [array if half is None else widened(array, half) for array in arrays]
    with np.errstate(all="ignore"):
        total: Array = reduce(_OPERATORS[operator], wide[1:], wide[0])
        if total.dtype.kind == "f" and divisor != 1:
            total = total / total.dtype.type(divisor)
        return total if half is None else narrowed(total, half)
