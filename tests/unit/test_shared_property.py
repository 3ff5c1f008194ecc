"""What is made at its first use is the same for threads that come at once."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from ferrorpc.shared_property import shared_property
from tests.threads import in_threads, results_of


class Pair:
    """Its parts are made by two threads at the same time, if threads can be in there together."""

    both: Any = None

    def made(self) -> object:
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)
        return object()


class Shared(Pair):
    part = shared_property(Pair.made)


def test_threads_that_come_at_once_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "both", threading.Barrier(2))
    shared = Shared()
    first, second = results_of(in_threads(2, lambda number: shared.part))
    assert first is second is shared.part


def test_each_instance_has_its_own_and_the_class_has_the_property(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "both", threading.Barrier(1))
    shared = Shared()
    assert shared.part is shared.part is not Shared().part
    assert isinstance(Shared.part, shared_property)
    own = shared.part = object()  # as backends set their own latch
    assert shared.part is own
