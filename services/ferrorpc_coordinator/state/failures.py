"""How requests are refused, and the words for it."""

from __future__ import annotations

from ferrorpc.v1 import error_pb2


class Refused(Exception):
    """A request is answered with an error that exists already, such as the first cause of a generation's end."""

    def __init__(self, detail: error_pb2.ErrorDetail) -> None:
        super().__init__(detail.message)
        self.detail = detail


def seconds(duration_ns: int) -> str:
    """A duration as a message says it, such as "2.0 s"."""
    return f"{duration_ns / 1e9:.1f} s"
