"""The first message of a call, for which only some seconds are waited: until it is there, anybody may be the caller.

gRPC itself waits for the request of a unary call as long as its caller likes. So every method of this server is registered as
one whose handler reads requests; for clients that makes no difference. What is read is not kept beside what the handler keeps.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc.aio

from ferrorpc.errors import CoordinatorUnavailableError, UsageError

FIRST_MESSAGE_SECONDS: Final = 10.0
"""A call whose first message is not complete after this long, on a slow link too, is ended."""


async def first_message(context: grpc.aio.ServicerContext[Any, Any], what: str) -> bytes:
    """Reads the first message of a call.

    Args:
        what: the name of the message, for errors.

    Raises:
        CoordinatorUnavailableError: it did not come in time. The caller, or the network to it, may have stood still: a member
            dials again.
        UsageError: the call ended before.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            data = await context.read()
    except TimeoutError:
        raise CoordinatorUnavailableError(
            f"the call sent no complete {what} within {FIRST_MESSAGE_SECONDS:.0f} s",
            hint="call again; the caller's process, or the network to it, stood still",
        ) from None
    if not isinstance(data, bytes):  # the end of the call is grpc.aio.EOF
        raise UsageError(f"the call ended before its {what}")
    return data
