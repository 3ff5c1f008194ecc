"""When those that an operation waits for are asked, and the wait is explained."""

from __future__ import annotations

import contextlib

import pytest

from ferrorpc.collectives import driver
from ferrorpc.collectives.driver import EXPLAIN_SECONDS, WaitTimers, drive
from ferrorpc.collectives.polling import Polling
from ferrorpc.errors import FerroError, PeerLostError
from ferrorpc.guard import Guard, Latch
from ferrorpc.testing import ManualClock
from tests.unit.collectives.test_progress import Never, Scripted, both, run


class SlowPolled(Scripted):
    """Complete 1.6 s after it began. It moves with each poll."""

    polling = Polling(100_000)
    position = 0

    def advance(self) -> bool:
        self.advances += 1
        self.position += 1
        if self._error is not None and self.guard.waited > 0.2:
            raise self._error
        return self.guard.waited > 1.6


@pytest.mark.parametrize("error", [None, PeerLostError(1, "gone")])
def test_what_was_polled_and_is_over_no_longer_watches_its_generation(error: FerroError | None) -> None:
    latch = Latch()
    with contextlib.suppress(PeerLostError):
        drive(SlowPolled(latch, error=error))
    assert not latch._watchers


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a moment is not taken for an operation that does."""
    monkeypatch.setattr(driver, "PROBE_SECONDS", 1.0)


@both
@pytest.mark.usefixtures("patient")
def test_what_is_polled_and_moves_asks_nobody(way: str) -> None:
    execution = SlowPolled(Latch())
    run(way, execution)
    assert execution.probes == 0


@both
@pytest.mark.usefixtures("patient")
def test_what_makes_progress_asks_nobody(way: str) -> None:
    execution = Scripted(Latch(), steps=300)
    run(way, execution)
    assert execution.probes == 0


def test_the_wait_of_who_takes_a_message_late_is_explained_from_then_on() -> None:
    clock = ManualClock()
    execution = Never(Latch(), clock=clock, seconds=60.0)
    timers = WaitTimers(execution)
    clock.advance(100.0)
    execution.guard = Guard(clock, Latch(), 60.0)
    timers.progressed()
    explained: list[int] = []
    execution.explain = lambda: explained.append(1) or ""  # type: ignore[method-assign, func-returns-value]
    clock.advance(EXPLAIN_SECONDS / 2)
    timers.act()
    assert not explained
    clock.advance(EXPLAIN_SECONDS / 2)
    timers.act()
    assert explained
