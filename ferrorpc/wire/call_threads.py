"""The threads that gRPC starts for a stream: the system may refuse them, and one that lacks memory ends without a word."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import grpc

from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import thread_needed
from ferrorpc.wire.keep_at_exit import keep_for_ever

END_SECONDS: Final = 0.25
"""How long gRPC's thread may take to notice that its call was cancelled. It takes less than a millisecond."""


@contextlib.contextmanager
def call_threads(channel: grpc.Channel, purpose: str) -> Iterator[None]:
    """Around the beginning of a stream on `channel`.

    Raises:
        LimitExceededError: the system refuses a thread for it. The channel must then not be closed, and is never collected:
            both would wait for that thread.
    """
    try:
        with thread_needed(f"of gRPC, for {purpose}"):
            yield
    except LimitExceededError:
        keep_for_ever(channel)
        raise


def close_cancelled(channel: grpc.Channel, call: Any) -> None:
    """Closes a channel whose one call, a stream, was cancelled. Where gRPC's thread for it has ended, it is left as it is and
    never collected: both would wait for that thread."""
    ended = threading.Event()
    if call.add_callback(ended.set) and not ended.wait(END_SECONDS):
        keep_for_ever(channel)
    else:
        channel.close()
