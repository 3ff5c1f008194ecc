"""One Session call that nobody answers: what it leaves behind, and what is said of it."""

import threading

import grpc
import pytest

from ferrorpc.coordination.session_stream import SessionStream
from ferrorpc.errors import CoordinatorUnavailableError
from ferrorpc.v1.session_pb2 import StatusRequest
from tests.waiting import eventually


class Nowhere:
    """A way to a coordinator that is not there."""

    address = "127.0.0.1:1"

    def __call__(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    def diagnose(self) -> None:
        return None


def test_a_stream_that_is_closed_leaves_no_thread_and_says_that_it_is_closed() -> None:
    """A session makes one for every attempt to reach its coordinator."""
    before = set(threading.enumerate())
    stream = SessionStream(Nowhere())
    with pytest.raises(CoordinatorUnavailableError, match=r"the coordinator at 127\.0\.0\.1:1 cannot be reached"):
        list(stream.frames())
    for _ in range(2):
        stream.close()
    with pytest.raises(CoordinatorUnavailableError, match="the connection is closed"):
        stream.status(StatusRequest(job="a"), 5.0)
    eventually(lambda: set(threading.enumerate()) <= before, "the end of its threads")


def test_who_reads_a_stream_is_told_why_this_side_has_closed_it() -> None:
    """gRPC would say that the call was cancelled, as if the coordinator had done that."""
    stream = SessionStream(Nowhere())
    stream.close(CoordinatorUnavailableError("no Welcome for 10 s"))
    stream.close()
    with pytest.raises(CoordinatorUnavailableError, match="no Welcome for 10 s"):
        list(stream.frames())
