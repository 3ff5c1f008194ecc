"""What processes agree on: the versions of their protocols, the sizes that they take, and what is valid."""

from __future__ import annotations

import re
from typing import Final

from ferrorpc.errors import UsageError

SESSION_PROTOCOL_VERSION: Final = 1
"""Of a member's session with its coordinator."""
DATA_PROTOCOL_VERSION: Final = 5
"""Of what ranks send each other: the streams, the messages and segments of shared memory (`collectives/arena`), and the plans,
which run over both. One number, so that ranks which differ in the plans alone refuse each other on either way."""
LEASE_SECONDS_MAX: Final = 300
KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 100_000
"""In the store of a job."""
STORE_BYTES_MAX: Final = 256 << 20
"""Of all keys and values of a job."""
PAYLOAD_BYTES_MAX: Final = 4 << 10
"""Of one member at a barrier."""
BARRIER_BYTES_MAX: Final = 1 << 20
"""Of all members at a barrier together, which must fit into its answer."""
FRAME_BYTES_MAX: Final = 256 << 10
"""Any control frame except one that sets a value."""
WRITES_MAX: Final = 128
"""Unanswered writes of a session. A coordinator remembers the results of this many, in case they are sent again."""
NCCL_ID_BYTES: Final = 128
RANKS_PER_NCCL_ID: Final = 128
VALID_KEY: Final = re.compile(r"[!-~]+")
_COUNTER: Final = re.compile(rb"-?[0-9]{1,20}")


def sum_of(key: str, value: bytes, amount: int) -> int:
    """What a key of the store holds once an amount is added to its value.

    Raises:
        UsageError: the value is no decimal number, or the sum does not fit into 64 bits.
    """
    if not _COUNTER.fullmatch(value):
        raise UsageError(
            f"key {key!r} holds {value[:32]!r}, which is no decimal number to add to",
            hint="set it to digits first, such as b'0', or count in another key",
        )
    total = int(value) + amount
    if not -(1 << 63) <= total < 1 << 63:
        raise UsageError(
            f"key {key!r} would hold {total}, which does not fit into 64 bits", hint="set it to b'0' to count anew"
        )
    return total
