"""Two transports as one: the time that closing may take, and whom they have not reached."""

from __future__ import annotations

from collections.abc import Container
from types import SimpleNamespace
from typing import Any

from ferrorpc.testing import ManualClock
from ferrorpc.transports.routed import RoutedTransport


class Slow:
    """Takes all the time it is given, up to `seconds`."""

    rank, size, mailbox = 0, 3, None

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.given = -1.0
        self.unawaited: Container[int] = ()
        self.finished_at = -1.0

    def finish(self) -> None:
        self.finished_at = self.clock.now()

    def close(self, timeout: float, unawaited: Container[int]) -> None:
        self.given, self.unawaited = timeout, unawaited
        self.clock.advance(min(timeout, self.seconds))


def given(near_takes: float, timeout: float = 10.0) -> tuple[float, float]:
    clock, unwell = ManualClock(), {2}
    near: Any = Slow(clock, near_takes)
    far: Any = Slow(clock, 0.0)
    began = clock.now()
    RoutedTransport(near, (1,), far, clock).close(timeout, unwell)
    assert far.finished_at == began, "peers on other hosts do not wait for those of this one"
    assert near.unawaited is far.unawaited is unwell
    return near.given, far.given


def test_a_host_peer_that_hangs_leaves_a_second_for_goodbyes_and_one_that_does_not_all_of_the_time() -> None:
    assert given(near_takes=100.0) == (9.0, 1.0)
    assert given(near_takes=1.0) == (9.0, 9.0)
    assert given(near_takes=100.0, timeout=1.0) == (0.5, 0.5)


def test_whom_either_has_not_reached_is_told() -> None:
    near: Any = SimpleNamespace(unreached=dict)
    far: Any = SimpleNamespace(rank=0, size=3, mailbox=None, unreached=lambda: {2: "not reached at h:1 in 3.0 s"})
    assert RoutedTransport(near, (1,), far, ManualClock()).unreached() == {2: "not reached at h:1 in 3.0 s"}
