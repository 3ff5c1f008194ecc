"""Chooses the converter of a half type: the fastest available one that passes the self-test.

PyTorch and ml_dtypes are used if the program has imported them; they are never imported here. Ranks of a group get equal
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


class _Cache(threading.local):
    """The converters of one thread, indexed by whether PyTorch is loaded and by dtype."""

    def __init__(self) -> None:
        self.found: tuple[list[Converter | None], ...] = ([None] * (max(DType) + 1), [None] * (max(DType) + 1))


_CACHE: Final = _Cache()


def converter(dtype: DType) -> Converter:
    """This thread's converter of a half type. Its slots are valid until the thread uses the converter again."""
    cached = _CACHE.found["torch" in sys.modules]
    found = cached[dtype]
    if found is None:
        makers = available(dtype)
        found = next(makers[name]() for name in makers if name == "numpy" or _is_exact(dtype, name))
        if "torch" in makers or sys.modules.get("torch") is None:
            cached[dtype] = found
    return found


def available(dtype: DType) -> dict[str, Callable[[], Converter]]:
    """The factories of the converters that can be made now, by name, the fastest first. "numpy" is always available."""
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
    """A module whose import is complete, or None. Another thread may still be importing it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
