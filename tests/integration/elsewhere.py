"""Becomes a program, in a process without what only Linux has: python elsewhere.py SCRIPT.py | MODULE [ARGUMENTS]

The standard library and gRPC are loaded before, as they would be those of the other system.
"""

import asyncio  # noqa: F401
import ctypes
import fcntl
import multiprocessing  # noqa: F401
import os
import runpy
import signal
import socket
import sqlite3  # noqa: F401
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import time

import grpc.aio  # noqa: F401
import numpy  # noqa: F401

OF_LINUX = {
    os: "memfd_create sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise pidfd_open eventfd waitid pipe2",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SHRINK F_SEAL_GROW F_SEAL_SEAL F_SEAL_WRITE",
    socket: "SO_PEERCRED MSG_NOSIGNAL MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK TCP_KEEPIDLE TCP_USER_TIMEOUT",
    signal: "SIGRTMIN sigtimedwait SIGPWR",
    time: "CLOCK_BOOTTIME",
}


class Library(ctypes.CDLL):
    """A C library without functions of Linux."""

    def __getattr__(self, name: str) -> object:
        if name in ("fallocate", "prctl", "mallopt", "adjtimex"):
            raise AttributeError(f"symbol not found: {name}")
        return super().__getattr__(name)


if __name__ == "__main__":
    for module, names in OF_LINUX.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    ctypes.CDLL = Library
    sys.platform = "darwin"
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
