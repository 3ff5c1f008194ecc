"""The request iterator of one incoming call: its messages, of which short ones can be handled before the reader wakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

_HANDLED: Final = object()
"""Takes the place of a message that `intercept` has handled."""


class RequestIterator:
    """The messages in order, for one reader thread.

    gRPC deserializes each message on its own thread, which then wakes the reader. `intercept` runs there and may handle the
    message at once, which saves a thread switch for short messages. Order is kept, because gRPC fetches the next message only
    when the reader asks for it.
    """

    def __init__(self) -> None:
        self.intercept: Callable[[bytes], bool] = lambda _: False
        """Returns whether it has handled the message. It must neither block nor raise."""
        self._messages: Iterator[Any] = iter(())

    def deserialize(self, message: bytes) -> object:
        """The call's `request_deserializer`."""
        return _HANDLED if self.intercept(message) else message

    def attach(self, messages: Iterator[Any]) -> RequestIterator:
        """Sets gRPC's iterator, once the call has begun. Returns itself."""
        self._messages = messages
        return self

    def __iter__(self) -> RequestIterator:
        return self

    def __next__(self) -> bytes:
        while (message := next(self._messages)) is _HANDLED:
            pass
        return cast("bytes", message)
