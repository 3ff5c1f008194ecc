"""What the store asks of the line to its coordinator."""

from __future__ import annotations

import pytest

from ferrorpc.coordination.remote_store import RemoteStore
from ferrorpc.v1 import store_pb2


class Line:
    """Answers everything, and remembers how long it was allowed to take."""

    def __init__(self):
        self.seconds = []

    def ask(self, label, seconds, late, store):
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
    line = Line()
    request_of(RemoteStore(line, 60.0))
    assert line.seconds == [60.0]
