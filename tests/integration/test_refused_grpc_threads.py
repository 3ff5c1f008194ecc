"""Where the system refuses a thread that gRPC starts by itself, the call that needs it says so, and nothing waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ferrorpc.config import Config
from ferrorpc.coordination.channel import ChannelFactory
from ferrorpc.coordination.session_stream import SessionStream
from ferrorpc.errors import LimitExceededError
from ferrorpc.wire.frames import Key
from tests.integration.lane_ranks import Rank, assignment_of, random_bytes, send, two_servers
from tests.waiting import eventually

SERVER = """
import threading
from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.transports.grpc.server import WorkerServer

start = threading.Thread.start

def refused(thread):
    if not thread.name.startswith("ferrorpc"):
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = refused
try:
    WorkerServer("127.0.0.1", "127.0.0.1")
except LimitExceededError as error:
    print(error.message)
"""


@pytest.fixture
def no_more_threads_for_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ferrorpc's own threads can be started."""
    start = threading.Thread.start

    def start_unless_grpcs(thread: threading.Thread) -> None:
        if not thread.name.startswith("ferrorpc"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_grpcs)


def test_a_server_without_its_thread_says_so_and_the_process_ends() -> None:
    result = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60)
    assert (
        "the system refuses a thread (of gRPC's server) beside the 2 of this process: can't start new thread" in result.stdout
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.usefixtures("no_more_threads_for_grpc")
def test_a_session_without_grpcs_threads_says_so() -> None:
    with pytest.raises(LimitExceededError, match=r"refuses a thread \(of gRPC, for the session\)"):
        SessionStream(ChannelFactory("127.0.0.1:1", "j", Config({})))


def test_a_lane_without_grpcs_threads_ends_the_generation_with_that(request: pytest.FixtureRequest) -> None:
    with two_servers(1) as servers:
        rank = Rank(0, servers[0]).enter(assignment_of(0, servers))
        request.getfixturevalue("no_more_threads_for_grpc")
        send(rank, 1, Key(0, 0, 1), random_bytes(9))
        eventually(lambda: rank.failures, "the failure")
        assert isinstance(rank.failures[0], LimitExceededError)
        assert "refuses a thread (of gRPC, for the lane to rank 1)" in rank.failures[0].message
        assert not rank.lost
