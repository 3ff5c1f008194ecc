"""Limits of flow control: chunk size, eager chunks, and the memory that unexpected messages may take."""

import os
from functools import cache
from typing import Final

from ferrorpc.control_groups import tightest_limit

CHUNK_BYTES: Final = 1 << 20
"""Size of the chunks of a message. Much larger chunks make gRPC slower; smaller ones cost more headers."""
EAGER_CHUNKS: Final = 4
"""Chunks of a message that may be sent before its receiver has entered the operation. The rest need a grant."""
EAGER_BYTES: Final = EAGER_CHUNKS * CHUNK_BYTES
"""Offset in a message from which chunks need a grant."""

FRAME_COST_BYTES: Final = 1 << 10
"""Memory that a waiting frame takes besides its payload, rounded up."""


@cache
def unexpected_bytes_max() -> int:
    """Limit of the unexpected messages that wait in a rank, from all ranks together: half of the memory it may use.

    Correct programs come near it only where a sender runs far ahead of its receiver. Then an error explains that, before the
    kernel kills a process without a reason.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(memory_bytes, tightest_limit("memory", ("memory.limit_in_bytes",), "memory.max", int))) // 2
