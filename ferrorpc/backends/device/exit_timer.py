"""Ends the process after some time, even if no thread gets the interpreter any more.

CuPy keeps the interpreter's lock during some of CUDA's calls, and CUDA blocks many calls while the GPU waits for something
that never comes. Then no Python thread runs, and none can end the process. So the timer is one of the C library's, whose
thread calls `_exit`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

_NOTIFY_BY_THREAD: Final = 2
"""SIGEV_THREAD of Linux."""
_log = logging.getLogger("ferrorpc.backends.device")


class _Notification(ctypes.Structure):
    """struct sigevent: calls `function(value)` on a thread."""

    _fields_ = (
        ("value", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _Setting(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_seconds", "every_ns", "first_seconds", "first_ns"))


def exit_after(seconds: float, code: int) -> Callable[[], None]:
    """Ends the process with this exit code after so many seconds. Returns a function that cancels that.

    Where the system has no such timers nothing happens.
    """
    library: Any = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    notification = _Notification(value=code, notify=_NOTIFY_BY_THREAD)
    whole = int(seconds)
    setting = _Setting(first_seconds=whole, first_ns=max(1, int((seconds - whole) * 1e9)))
    try:
        notification.function = ctypes.cast(library._exit, ctypes.c_void_p)
        failed = library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(notification), ctypes.byref(timer))
        failed = failed or library.timer_settime(timer, 0, ctypes.byref(setting), None)
    except AttributeError:
        _log.debug("the C library has no timers")
        return _nothing
    if failed:
        _log.debug("no timer: %s", os.strerror(ctypes.get_errno()))
        return _nothing
    return lambda: library.timer_delete(timer)


def _nothing() -> None:
    """Cancels nothing."""
