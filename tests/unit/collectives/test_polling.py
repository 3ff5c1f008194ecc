"""Polling ends soon also where the processor is busy: only then its driver looks at the latch and the deadline."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from ferrorpc.collectives import polling
from ferrorpc.collectives.polling import LOOKS, YIELDS, DevicePolling, Polling

POLLINGS = {"shared memory": lambda: Polling(1 << 20), "a GPU": lambda: DevicePolling(lambda: True)}
YIELD_SECONDS = 0.005
"""As on a processor that two other processes use, too."""


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Grows with each yield."""
    yields: list[None] = []

    def yield_for_long() -> None:
        yields.append(None)
        time.sleep(YIELD_SECONDS)

    monkeypatch.setattr(polling.os, "sched_yield", yield_for_long)
    return yields


@pytest.mark.parametrize("name", POLLINGS)
def test_yields_to_a_busy_processor_are_few(name: str, yields: list[None]) -> None:
    """They took so long that a rank learned of the end of its generation, and of its own deadline, after ten seconds."""
    assert not POLLINGS[name]().spin(itertools.repeat(0))
    assert 0 < len(yields) <= 10 < min(LOOKS, YIELDS)


@pytest.mark.parametrize("name", POLLINGS)
def test_what_ends_during_a_long_yield_has_ended(name: str, yields: list[None]) -> None:
    """The last yield is followed by one more look."""
    steps = iter(lambda: bool(yields), True)
    assert POLLINGS[name]().spin(steps)


def test_a_gpu_is_looked_at_again_at_once_only_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "YIELD_SECONDS", 60.0)  # only looks count, however busy the processor is
    looks = iter(range(1000))
    assert not DevicePolling(lambda: next(looks) < 4).spin(iter(lambda: None, True))
    assert next(looks) == 5
    assert not DevicePolling(lambda: True).spin(iter(int, None)), "patience ends"
    assert DevicePolling(lambda: True).spin(range(4))
