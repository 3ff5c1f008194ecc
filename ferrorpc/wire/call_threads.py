"""The threads that gRPC starts for a stream, where the system may refuse them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import thread_needed
from ferrorpc.wire.keep_at_exit import keep_for_ever


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
