"""The store of a world in one process has the limits of a coordinator's."""

import pytest

from ferrorpc.coordination import local_store
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import LimitExceededError
from ferrorpc.wire.limits import STORE_BYTES_MAX, VALUE_BYTES_MAX


def test_the_bytes_of_all_keys_together_are_limited():
    store = LocalWorld(1).session(0).store
    value = bytes(VALUE_BYTES_MAX - 4)  # which the store does not copy
    for number in range(STORE_BYTES_MAX // VALUE_BYTES_MAX):
        store.set(f"{number:04}", value)
    with pytest.raises(LimitExceededError, match="bytes in the store of job local would be 268435457, the limit"):
        store.set("0000", value + b"x")
    store.set("0000", b"")
    store.set("more", value[4:])
    store.delete("more")
    store.set("0000", value)


def test_keys_are_limited_and_a_deleted_one_makes_room(monkeypatch):
    monkeypatch.setattr(local_store, "KEYS_MAX", 2)
    store = LocalWorld(1).session(0).store
    store.set("a", b"1")
    store.set("b", b"2", bind="session")
    for refused in (lambda: store.set("c", b"3"), lambda: store.add("c"), lambda: store.compare_set("c", None, b"3")):
        with pytest.raises(LimitExceededError, match="keys of job local would be 3, the limit keys is 2"):
            refused()
    assert store.add("a", 1) == 2
    assert store.delete("b")
    store.set("c", b"3")
    assert store.keys() == ["a", "c"]
