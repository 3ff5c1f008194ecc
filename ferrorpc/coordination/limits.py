"""Limits of what a coordinator takes. They are checked before sending, so that no oversized request ends a session."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Final

from ferrorpc.errors import InvalidRankError, MessageTooLargeError, UsageError, require
from ferrorpc.wire.limits import FRAME_BYTES_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, VALID_KEY, VALUE_BYTES_MAX

BINDINGS: Final = ("job", "session", "generation")
_REQUEST_BYTES: Final = 64
"""More than a request has beside its keys."""
_LENGTH_BYTES: Final = 3
"""What a request needs at most beside the bytes of each key."""


def check_key(key: str) -> None:
    """Refuses an invalid key.

    Raises:
        LimitExceededError: longer than 512 bytes.
        UsageError: not text, empty, or not made of printable ASCII without blanks.
    """
    if not isinstance(key, str):
        raise UsageError(
            f"a name in the store or of a barrier is text, not {type(key).__name__}", hint="use keys such as 'run/lr'"
        )
    require(f"the length of key {key[:40]!r}...", len(key.encode("utf-8", "surrogatepass")), "key_bytes", KEY_BYTES_MAX)
    if not VALID_KEY.fullmatch(key):
        raise UsageError(f"key {key!r} is not made of printable ASCII without blanks", hint="use keys such as 'run/lr'")


def check_keys(keys: str | Iterable[str]) -> list[str]:
    """Several keys, or a single one. Refuses more than fit into a request of 256 KiB, and raises as `check_key`."""
    try:
        found = [keys] if isinstance(keys, str) else list(keys)
    except TypeError:  # an array without dimensions, too
        raise UsageError(f"{keys!r} is no list of keys", hint="pass one, such as ['run/lr']") from None
    for key in found:
        check_key(key)
    request_bytes = _REQUEST_BYTES + sum(len(key) + _LENGTH_BYTES for key in found)
    require(f"the bytes of {len(found)} keys", request_bytes, "frame_bytes", FRAME_BYTES_MAX, MessageTooLargeError)
    return found


def check_prefix(prefix: str) -> None:
    """Refuses a prefix that no key can have. Raises as `check_key`."""
    if prefix != "":
        check_key(prefix)


def check_value(value: bytes) -> bytes:
    """The bytes of a value. Refuses more than 1 MiB, and anything but bytes."""
    found = _bytes_of(value, "a store holds")
    require("the bytes of a value", len(found), "value_bytes", VALUE_BYTES_MAX, MessageTooLargeError)
    return found


def check_values(expected: bytes | None, value: bytes) -> tuple[bytes | None, bytes]:
    """The bytes of the two values of a compare_set. Refuses more than 1 MiB together, and raises as `check_value`."""
    wanted, found = None if expected is None else check_value(expected), check_value(value)
    both = len(wanted or b"") + len(found)
    require("the bytes of both values of a compare_set", both, "value_bytes", VALUE_BYTES_MAX, MessageTooLargeError)
    return wanted, found


def check_payload(payload: bytes) -> bytes:
    """The bytes of a barrier's payload. Refuses more than 4 KiB, and anything but bytes."""
    found = _bytes_of(payload, "a barrier's payload is")
    require("the bytes of a barrier's payload", len(found), "payload_bytes", PAYLOAD_BYTES_MAX, MessageTooLargeError)
    return found


def check_amount(amount: int) -> int:
    """The amount to add to a counter. Refuses anything but a signed 64-bit integer."""
    try:
        found = index(amount)
    except TypeError:
        raise UsageError(f"a counter counts integers, not {amount!r}", hint="pass an int") from None
    if not -(1 << 63) <= found < 1 << 63:
        raise UsageError(f"{found} does not fit into 64 bits", hint="a counter is a signed 64-bit integer")
    return found


def check_participants(ranks: Iterable[int] | None, own: int, size: int) -> tuple[int, ...]:
    """The participants of a barrier, in ascending order: the given world ranks of a world of `size`, or all for None.

    Raises:
        UsageError: `ranks` are not integers.
        InvalidRankError: a rank does not exist, or the caller is not among them.
    """
    try:
        chosen = tuple(range(size)) if ranks is None else tuple(sorted({index(rank) for rank in ranks}))
    except TypeError:
        raise UsageError(f"ranks={ranks!r} is no list of ranks", hint="pass integers, such as [0, 2]") from None
    outside = [rank for rank in chosen if not 0 <= rank < size]
    if outside or own not in chosen:
        wrong = f"ranks {outside} are" if outside else f"rank {own} itself is not"
        raise InvalidRankError(f"{wrong} among the {len(chosen)} participants of a world of {size}")
    return chosen


def check_binding(bind: str) -> None:
    """Refuses an unknown binding."""
    if bind not in BINDINGS:
        hint = "leave it out, unless the key is to be deleted when this session or this generation ends"
        raise UsageError(f"bind={bind!r} is not one of {', '.join(BINDINGS)}", hint=hint)


def _bytes_of(value: bytes, what: str) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        hint = "encode it: str.encode(), json.dumps(...).encode()"
        raise UsageError(f"{what} bytes, not {type(value).__name__}", hint=hint)
    return bytes(value)
