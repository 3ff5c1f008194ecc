"""Settings of glibc's malloc: freed message buffers are kept for reuse instead of being returned to the kernel.

For every chunk gRPC allocates and frees several buffers of the chunk's size, on its own threads. By default glibc returns a
large block to the kernel when it is freed, so every page of the next block is a page fault again. Those cost as much as sending
the chunk: half of the throughput between two processes. But glibc's mmap threshold is dynamic: after a large block was freed,
blocks of up to that size come from the heap, which keeps up to twice that much free memory. So one large block is allocated and
freed before the first stream. That costs no memory, as the block is never touched.

glibc also gives almost every thread an arena (heap) of its own, and each arena keeps the most that its threads ever held: the
dozen threads that touch a chunk kept 10 MB each, although at most 30 MB were in use at a time. So the number of arenas is
limited to one. A wait for its lock is far shorter than the copy of a chunk, and small blocks come from the per-thread cache,
which needs no lock.

Where MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ is set, glibc's threshold is not dynamic, and this changes nothing; where
MALLOC_ARENA_MAX or the tunable of that name is set, it decides on the number of arenas. Other allocators are not affected.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

import numpy as np

LARGEST_BYTES: Final = (32 << 20) - (64 << 10)
"""Just under the largest block that raises glibc's dynamic mmap threshold."""

_M_ARENA_MAX: Final = -8
"""M_ARENA_MAX in malloc.h."""


@cache
def keep_freed_memory() -> None:
    """From now on freed blocks of up to LARGEST_BYTES are reused, by all threads. Takes effect once a process."""
    is_configured = "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None and not is_configured:
        mallopt(_M_ARENA_MAX, 1)
    np.empty(LARGEST_BYTES, np.uint8)  # and freed at once
