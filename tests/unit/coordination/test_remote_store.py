"""What the store asks over its connection to the coordinator."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ferrorpc.coordination.remote_store import RemoteStore
from ferrorpc.errors import StoreTimeoutError, UsageError
from ferrorpc.guard import Latch
from ferrorpc.v1 import store_pb2
from ferrorpc.wire.limits import WRITES_MAX


class Answering:
    """Answers everything, and remembers how long it was allowed to take."""

    ended_by = None

    def __init__(self):
        self.memory = Latch()
        self.seconds = []

    def ask(self, label, seconds, timeout_error, latch, store):
        self.seconds.append(seconds)
        return store_pb2.StoreResponse(found=True)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda store: store.set("k", b"v"),
        lambda store: store.add("k"),
        lambda store: store.compare_set("k", None, b"v"),
        lambda store: store.delete("k"),
        lambda store: store.keys(),
        lambda store: store.get("k"),
        lambda store: store.wait("k"),
    ],
)
def test_a_disk_or_a_machine_that_is_slow_has_as_long_as_the_group(request_of):
    connection = Answering()
    request_of(RemoteStore(connection, 60.0))
    assert connection.seconds == [60.0]


class Silent:
    """Answers nothing until it is told to, and counts who waits."""

    ended_by = None

    def __init__(self):
        self.memory = Latch()
        self.asking = 0
        self.most = 0
        self.full = threading.Event()
        self.answers = threading.Event()
        self._lock = threading.Lock()

    def outage(self):
        return ""

    def ask(self, label, seconds, timeout_error, latch, store):
        with self._lock:
            self.asking += 1
            self.most = max(self.most, self.asking)
            if self.asking == WRITES_MAX:
                self.full.set()
        assert self.answers.wait(20)
        with self._lock:
            self.asking -= 1
        return store_pb2.StoreResponse(found=True, number=1)


def test_no_more_writes_are_under_way_than_a_coordinator_remembers():
    """It could not tell that it has carried out the others, were all repeated after a blip."""
    connection = Silent()
    store = RemoteStore(connection, 20.0)
    with ThreadPoolExecutor(WRITES_MAX + 40) as pool:
        sums = [pool.submit(store.add, "k") for _ in range(WRITES_MAX + 40)]
        assert connection.full.wait(20)
        hasty = RemoteStore(connection, 20.0)
        hasty._writing, hasty._timeout = set(range(WRITES_MAX)), 0.05
        with pytest.raises(StoreTimeoutError, match="no turn") as caught:
            hasty.set("k", b"v")
        assert caught.value.retryable
        connection.answers.set()
        assert [each.result(20) for each in sums] == [1] * len(sums)
    assert connection.most == WRITES_MAX


def test_where_the_connection_has_ended_nobody_waits_for_a_turn():
    """In a forked child the lock of the turns may be held for ever."""
    connection = Silent()
    store = RemoteStore(connection, 20.0)
    connection.ended_by = UsageError("this process was forked from a member")
    with store._turns.lock, pytest.raises(UsageError, match="forked"):
        store.add("k")
