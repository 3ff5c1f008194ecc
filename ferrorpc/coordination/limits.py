"""What may be sent to a coordinator. Checked before sending, so that a request that is too large never ends a session."""

from __future__ import annotations

import re
from typing import Final

from ferrorpc.errors import LimitExceededError, UsageError

KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 1 << 20
PAYLOAD_BYTES_MAX: Final = 4 << 10
FRAME_BYTES_MAX: Final = 256 << 10
RANKS_PER_ID: Final = 128
"""One NCCL id, minted by one leader, serves so many ranks."""
BINDINGS: Final = ("job", "session", "generation")
_KEY: Final = re.compile(r"[!-~]+")


def require(what: str, amount: int, limit: str, most: int) -> None:
    """Refuses an amount past a limit, in the coordinator's words.

    Raises:
        LimitExceededError: naming the limit.
    """
    if amount > most:
        raise LimitExceededError(f"{what} would be {amount}, the limit {limit} is {most}", limit=limit, most=most)


def check_key(key: str) -> None:
    """Refuses a key that no store takes.

    Raises:
        LimitExceededError: longer than 512 bytes.
        UsageError: empty, or with characters other than printable ASCII without the blank.
    """
    require(f"the length of key {key[:40]!r}...", len(key.encode("utf-8", "surrogatepass")), "key_bytes", KEY_BYTES_MAX)
    if not _KEY.fullmatch(key):
        raise UsageError(f"key {key!r} is not made of printable ASCII without blanks", hint="use keys such as 'run/lr'")


def check_value(value: bytes) -> None:
    """Refuses a value larger than 1 MiB, or one that is no bytes."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(
            f"a store holds bytes, not {type(value).__name__}", hint="encode it: str.encode(), json.dumps(...).encode()"
        )
    require("the bytes of a value", len(value), "value_bytes", VALUE_BYTES_MAX)


def check_payload(payload: bytes) -> None:
    """Refuses a barrier payload larger than 4 KiB."""
    require("the bytes of a barrier's payload", len(payload), "payload_bytes", PAYLOAD_BYTES_MAX)


def check_binding(bind: str) -> None:
    """Refuses what a key cannot be bound to."""
    if bind not in BINDINGS:
        raise UsageError(f"bind={bind!r} is not one of {', '.join(BINDINGS)}")
