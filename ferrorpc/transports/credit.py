"""Limits of flow control: chunk size, eager chunks, and the memory that unexpected messages may take."""

import contextlib
import os
from functools import cache
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 20
"""Size of the chunks of a message. Much larger chunks make gRPC slower; smaller ones cost more headers."""
EAGER_CHUNKS: Final = 4
"""Chunks of a message that may be sent before its receiver has entered the operation. The rest need a grant."""
EAGER_BYTES: Final = EAGER_CHUNKS * CHUNK_BYTES
"""Offset in a message from which chunks need a grant."""

FRAME_COST_BYTES: Final = 1 << 10
"""Memory that a waiting frame takes besides its payload, rounded up."""
_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@cache
def unexpected_bytes_max() -> int:
    """Limit of the unexpected messages that wait in a rank, from all ranks together: half of the memory it may use.

    Correct programs come near it only where a sender runs far ahead of its receiver. Then an error explains that, before the
    kernel kills a process without a reason.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or a limit of "max"
        memory_bytes = min(memory_bytes, int(_CONTAINER_LIMIT.read_text()))
    return memory_bytes // 2
