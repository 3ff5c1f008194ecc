"""Teaching the C allocator to keep the memory of messages, so that the kernel need not hand it out anew for every chunk.

Idea. gRPC allocates and frees several buffers of a chunk's size for every chunk, on threads of its own. glibc gives a large
block back to the kernel when it is freed, and each page of the next one is then a page fault again, which costs as much as
sending it (half of the throughput between two processes was lost to that). It has a remedy built in: having seen a large
block freed, it serves blocks of up to that size from memory that it keeps, up to twice as much a heap. So it is shown one,
once, before the first stream. That costs no memory, as the block is never touched.

Whoever sets MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ has switched that rule off, and it stays off. Other allocators
have nothing to learn from it.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

LARGEST_BYTES: Final = (32 << 20) - (64 << 10)
"""Just under the largest block that glibc takes as an example."""


@cache
def keep_freed_memory() -> None:
    """Once a process: blocks of up to LARGEST_BYTES are from now on reused instead of returned to the kernel."""
    block = np.empty(LARGEST_BYTES, np.uint8)
    del block
