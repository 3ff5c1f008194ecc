"""The host of this process, as far as sharing memory is concerned: whether it can share memory, and which ranks are candidates.

Two processes can share memory if they have the same kernel (boot id), the same abstract Unix sockets (network namespace) and
the same user. Equal identities only make ranks candidates; the proof is the handshake, in which they read each other's memory.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

PYTHON_MIN: Final = (3, 11, 1)
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_NETWORK: Final = "/proc/self/ns/net"


class HostIdentity(NamedTuple):
    """What must be equal for two ranks to be candidates."""

    boot_id: str
    network_namespace: int
    user: int


def unsupported_reason() -> str:
    """Why this process cannot share memory; empty when it can."""
    if sys.platform != "linux":
        return f"shared memory needs Linux, not {sys.platform}"
    if platform.machine() != "x86_64":
        return f"shared memory is tested on x86-64 only, and its order of stores is not that of {platform.machine()}"
    if sys.version_info < PYTHON_MIN:
        wanted, found = (".".join(map(str, version[:3])) for version in (PYTHON_MIN, sys.version_info))
        return f"shared memory needs Python {wanted}, whose os.sched_yield lets other threads run; this is {found}"
    if not Path(_BOOT_ID).is_file() or not os.path.exists(_NETWORK) or not os.path.exists("/proc/self/fd"):
        return f"shared memory needs {_BOOT_ID} and /proc/self, which are hidden here"
    return _refused_call()


def _refused_call() -> str:
    """Which of the system calls that are needed a sandbox refuses to this process; empty if none."""
    calls: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("ferrorpc"),
        "eventfd": lambda: os.eventfd(0),
    }
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as error:
            return f"shared memory needs {name}, and the system refuses it: {error.strerror}"
    return ""


def own_identity() -> HostIdentity:
    """The identity of this process's host. Only valid where `unsupported_reason` is empty."""
    return HostIdentity(Path(_BOOT_ID).read_text("ascii").strip(), os.stat(_NETWORK).st_ino, os.geteuid())
