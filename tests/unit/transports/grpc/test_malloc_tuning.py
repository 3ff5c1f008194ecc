"""The heaps of glibc's allocator after the first worker server of a process, as the allocator itself tells them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have nothing to learn")

PROGRAM = """
import ctypes, pathlib, sys, threading
import numpy as np
from ferrorpc.transports.grpc.malloc_tuning import keep_freed_memory

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = ctypes.c_int, ctypes.c_void_p
libc.fclose.argtypes = (ctypes.c_void_p,)

def heaps():
    file = libc.fopen(sys.argv[1].encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    return pathlib.Path(sys.argv[1]).read_text().count("<heap nr=")

def work(barrier):
    np.ones(1 << 20, np.uint8)
    barrier.wait()

keep_freed_memory()
before = heaps()
barrier = threading.Barrier(5)
for _ in range(4):
    threading.Thread(target=work, args=(barrier,)).start()
barrier.wait()
print(heaps() - before)
"""


def new_heaps(tmp_path, **chosen: str) -> int:
    """How many heaps four threads get that each allocate a megabyte."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "heaps")]
    done = subprocess.run(command, env=environment | chosen, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_threads_share_a_heap_so_that_freed_memory_serves_them_all(tmp_path):
    assert new_heaps(tmp_path) == 0


@pytest.mark.parametrize("chosen", [{"MALLOC_ARENA_MAX": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}])
def test_who_has_chosen_how_many_heaps_there_are_keeps_them(tmp_path, chosen):
    assert new_heaps(tmp_path, **chosen) == 4
