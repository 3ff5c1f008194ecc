"""Types of command line arguments."""

from __future__ import annotations

from argparse import ArgumentTypeError

from ferrorpc.config import size_bytes


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def amount(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def array_bytes(text: str) -> int:
    """A size such as "4MiB", of at least one float32."""
    try:
        found = size_bytes(text)
    except ValueError:
        found = 0
    if found < 4:
        raise ArgumentTypeError(f"{text!r} is no size of at least 4 bytes, such as 4MiB")
    return found
