"""How much may be under way that its receiver has not asked for."""

import contextlib
import os
from functools import cache
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 20
"""Messages travel in chunks of this size: far larger ones make gRPC slower, smaller ones cost a header each."""
EAGER_CHUNKS: Final = 4
"""Chunks of a message that may go before its receiver has entered the operation; the rest waits for its grant."""
EAGER_BYTES: Final = EAGER_CHUNKS * CHUNK_BYTES
"""Where in a message the part begins that has to be granted."""

FRAME_COST_BYTES: Final = 1 << 10
"""What a frame that waits takes besides its payload, rounded up."""
_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@cache
def unexpected_bytes_max() -> int:
    """How much may wait in a rank that it has not asked for, from all ranks together: half of the memory it may have.

    Nothing sound comes near it, except a sender that runs away from its receiver. An error then says so, before the kernel ends
    a process without a word.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # not in a container, or in one whose limit is "max"
        memory_bytes = min(memory_bytes, int(_CONTAINER_LIMIT.read_text()))
    return memory_bytes // 2
