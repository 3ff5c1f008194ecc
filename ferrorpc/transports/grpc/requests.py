"""The messages of one incoming call, as they come from gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

_TAKEN: Final = object()
"""Stands for a message that has been dealt with."""


class Requests:
    """In order, for the one thread that reads them.

    gRPC has each message first on a thread of its own, which then wakes the reader. There `look` may deal with it at once, so
    that what is short reaches whoever waits for it with one change of threads less. The reader asks for the next message
    only after that, so the order is the same.
    """

    def __init__(self) -> None:
        self.look: Callable[[bytes], bool] = _leave
        """Whether it has dealt with a message. It must neither block nor raise."""
        self._messages: Iterator[Any] = iter(())

    def arrive(self, message: bytes) -> object:
        """What the call's handler gives gRPC to pass each message through."""
        return _TAKEN if self.look(message) else message

    def of(self, messages: Iterator[Any]) -> Requests:
        """The same, now that the call has begun and brings these."""
        self._messages = messages
        return self

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> bytes:
        while (message := next(self._messages)) is _TAKEN:
            pass
        return cast("bytes", message)


def _leave(message: bytes) -> bool:
    """Leaves every message to the reader."""
    return False
