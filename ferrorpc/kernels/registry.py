"""Which converter of a half type a thread uses: the fastest that can be made and is proven to have the bits of NumPy's.

PyTorch and ml_dtypes are used where the program has imported them, and never imported here. Ranks of a group have equal
results whether they have them or not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from ferrorpc.kernels.half import Converter, NumpyBFloat16, NumpyFloat16
from ferrorpc.kernels.half_torch import TorchBFloat16, TorchFloat16
from ferrorpc.kernels.self_test import is_exact
from ferrorpc.types import DType


class _Kept(threading.local):
    """The converters of one thread, by whether PyTorch is loaded and by dtype."""

    def __init__(self) -> None:
        self.found: tuple[list[Converter | None], ...] = ([None] * (max(DType) + 1), [None] * (max(DType) + 1))


_KEPT: Final = _Kept()


def converter(dtype: DType) -> Converter:
    """This thread's converter of a half type. Whoever uses its slots next overwrites them."""
    kept = _KEPT.found["torch" in sys.modules]
    found = kept[dtype]
    if found is None:
        makers = available(dtype)
        found = next(makers[name]() for name in makers if name == "numpy" or _is_exact(dtype, name))
        if "torch" in makers or "torch" not in sys.modules:
            kept[dtype] = found
    return found


def available(dtype: DType) -> dict[str, Callable[[], Converter]]:
    """What makes converters of a half type here and now, the fastest first; "numpy" is always there."""
    torch, ml_dtypes = _loaded("torch"), _loaded("ml_dtypes")
    found: dict[str, Callable[[], Converter]] = {}
    if dtype is DType.FLOAT16:
        if torch is not None:
            found["torch"] = partial(TorchFloat16, torch)
        return found | {"numpy": NumpyFloat16}
    if torch is not None:
        found["torch"] = partial(TorchBFloat16, torch, ml_dtypes)
    if ml_dtypes is not None:
        found["ml_dtypes"] = partial(NumpyBFloat16, ml_dtypes)
    return found | {"numpy": NumpyBFloat16}


@cache
def _is_exact(dtype: DType, name: str) -> bool:
    makers = available(dtype)
    try:
        return is_exact(makers[name](), makers["numpy"]())
    except (AttributeError, RuntimeError, TypeError):  # too old for these dtypes, or built for another NumPy
        return False


def _loaded(name: str) -> Any:
    """A module once its import is complete, or None. Another thread may be in the middle of it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
