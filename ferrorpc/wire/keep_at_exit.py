"""Keeps objects that hold gRPC calls from being collected at interpreter exit, where that could hang the process.

A gRPC call takes a lock when it is collected. The last collection of a process runs after the interpreter has stopped all
daemon threads wherever they were, and a thread of gRPC may have stopped while it held that lock. Then the process never ends.
So at exit every object that holds a call gets a reference that is never released.
"""

from __future__ import annotations

import atexit
import ctypes
import weakref
from typing import Final

_holders: Final[weakref.WeakSet[object]] = weakref.WeakSet()


def keep_at_exit(holder: object) -> None:
    """At interpreter exit, `holder` and whatever it refers to is not collected."""
    _holders.add(holder)


def keep_for_ever(holder: object) -> None:
    """From now on, `holder` and whatever it refers to is not collected."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


def _keep() -> None:
    for holder in list(_holders):
        keep_for_ever(holder)


atexit.register(_keep)
