"""What holds calls of gRPC outlives the interpreter.

A call takes a lock when it is collected. The last collection of a process comes when the interpreter has stopped daemon threads
wherever they were, and gRPC's own may have stopped with that lock in hand: then the process never ends (seen in two of two
runs of the suite, and not in 160 starts in a row). So at exit everything that has a call gets a reference that nobody gives
back.
"""

from __future__ import annotations

import atexit
import ctypes
import weakref
from typing import Final

_holders: Final[weakref.WeakSet[object]] = weakref.WeakSet()


def keep_at_exit(holder: object) -> None:
    """From the process's exit on, `holder` and what it refers to are never collected."""
    _holders.add(holder)


def _keep() -> None:
    for holder in list(_holders):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


atexit.register(_keep)
