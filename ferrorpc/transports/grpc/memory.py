"""Teaching the C allocator to keep the memory of messages, once and in one place.

Idea. gRPC allocates and frees several buffers of a chunk's size for every chunk, on threads of its own. glibc gives a large
block back to the kernel when it is freed, and each page of the next one is then a page fault again, which costs as much as
sending it (half of the throughput between two processes was lost to that). It has a remedy built in: having seen a large
block freed, it serves blocks of up to that size from memory that it keeps, up to twice as much a heap. So it is shown one,
once, before the first stream. That costs no memory, as the block is never touched.

But glibc gives almost every thread a heap of its own, and each would keep the most that its thread ever held: the dozen
threads that touch a chunk kept ten megabytes each, although no more than thirty were in use at a time. So there is to be one
heap for all. Whoever waits for its lock waits for far less than a chunk's copy, and small blocks come from a cache that each
thread has without it.

Whoever sets MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ has switched the rule off, and it stays off; whoever sets
MALLOC_ARENA_MAX, or the tunable of that name, has as many heaps as that says. Other allocators have nothing to learn from
this.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

import numpy as np

LARGEST_BYTES: Final = (32 << 20) - (64 << 10)
"""Just under the largest block that glibc takes as an example."""

_M_ARENA_MAX: Final = -8
"""As malloc.h has it."""


@cache
def keep_freed_memory() -> None:
    """Once a process: blocks of up to LARGEST_BYTES are from now on reused, by all threads, not returned to the kernel."""
    if not _heaps_are_chosen():
        _limit_heaps()
    block = np.empty(LARGEST_BYTES, np.uint8)
    del block


def _heaps_are_chosen() -> bool:
    """Whether the environment says how many heaps there may be."""
    return "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")


def _limit_heaps() -> None:
    """No thread gets a heap of its own any more; those that have one keep it. Only glibc knows how."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
