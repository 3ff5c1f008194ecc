"""Protobuf messages from bytes that may be anything.

protobuf has two implementations. Where no wheel with compiled code exists (Alpine, say), pip installs the one in pure Python,
and that one raises UnicodeDecodeError instead of DecodeError where a string is not UTF-8.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ferrorpc.errors import CodecError

M = TypeVar("M", bound=Message)


def parse(message_type: type[M], data: bytes, problem: str) -> M:
    """The message in `data`.

    Raises:
        CodecError: `problem`, as the bytes are no such message.
    """
    try:
        return message_type.FromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise CodecError(problem) from None
