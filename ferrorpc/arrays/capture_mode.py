"""The calling thread's mode for the captures of CUDA graphs, for which CuPy has no call.

While a graph is captured, CUDA forbids some calls: by default also to the threads that do not capture. Querying an event and
pinning memory are among them. Such a call fails, and so does the capture. A thread in relaxed mode may make it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: the thread's calls leave all captures alone, its own too."""
_DRIVER: Final = "libcuda.so.1"


@cache
def _driver() -> Any:
    """CUDA's driver; None where there is none."""
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError:
        return None


def _exchange(mode: int) -> int:
    driver, exchanged = _driver(), ctypes.c_int(mode)
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
    return exchanged.value


exchange: Callable[[int], int] = _exchange
"""Sets the calling thread's mode, which needs a context. Returns the former. A stand-in for CuPy puts its own here."""
