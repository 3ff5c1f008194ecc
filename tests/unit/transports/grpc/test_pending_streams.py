"""Who has not said whose its stream is may wait for a while, and only so many may; who has said it is left alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from ferrorpc.errors import LimitExceededError
from ferrorpc.testing import ManualClock
from ferrorpc.transports.grpc.pending_streams import PENDING_MAX, PendingStreams

OPEN_TIMEOUT_SECONDS = 20.0


class Call:
    """What gRPC knows of a call."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Clock(ManualClock):
    """Knows the threads that were started on it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def start(self, body: Callable[[], None], name: str) -> None:
        self.threads.append(threading.Thread(target=body, name=name, daemon=True))
        self.threads[-1].start()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pending(clock: Clock) -> PendingStreams:
    return PendingStreams(clock, OPEN_TIMEOUT_SECONDS)


def test_who_says_nothing_is_sent_away_when_its_time_is_over(pending: PendingStreams, clock: ManualClock) -> None:
    first, second = Call(), Call()
    with pending.wait_for_open(first):
        clock.wait_for_parked(1)
        clock.advance(OPEN_TIMEOUT_SECONDS - 1)
        with pending.wait_for_open(second):
            clock.advance(1.0)
            assert first.cancelled.wait(20.0)
            clock.wait_for_parked(1)
            assert not second.cancelled.is_set()
            clock.advance(OPEN_TIMEOUT_SECONDS)
            assert second.cancelled.wait(20.0)


def test_who_has_said_it_is_left_alone_and_the_next_one_is_watched_again(pending: PendingStreams, clock: Clock) -> None:
    known, stranger = Call(), Call()
    with pending.wait_for_open(known):
        clock.wait_for_parked(1)
    clock.threads[0].join(20.0)
    assert not clock.threads[0].is_alive(), "nobody is there to be watched"
    clock.advance(OPEN_TIMEOUT_SECONDS)
    with pending.wait_for_open(stranger):
        clock.wait_for_parked(1)
        clock.advance(OPEN_TIMEOUT_SECONDS)
        assert stranger.cancelled.wait(20.0)
    assert not known.cancelled.is_set()


def test_the_one_that_has_waited_longest_makes_room(pending: PendingStreams) -> None:
    calls = [Call() for _ in range(PENDING_MAX + 2)]
    with contextlib.ExitStack() as waiting:
        for call in calls[:PENDING_MAX]:
            waiting.enter_context(pending.wait_for_open(call))
        assert not any(call.cancelled.is_set() for call in calls)
        for number, call in enumerate(calls[PENDING_MAX:], 1):
            waiting.enter_context(pending.wait_for_open(call))
            assert [each.cancelled.is_set() for each in calls] == [True] * number + [False] * (len(calls) - number)


def test_where_no_thread_could_be_had_the_next_stream_is_watched(
    pending: PendingStreams, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(body: Callable[[], None], name: str) -> None:
        monkeypatch.undo()
        raise LimitExceededError("the system refuses a thread")

    monkeypatch.setattr(clock, "start", refused)
    with pytest.raises(LimitExceededError), pending.wait_for_open(Call()):  # type: ignore[arg-type]
        pass
    stranger = Call()
    with pending.wait_for_open(stranger):  # type: ignore[arg-type]
        assert clock.threads, "somebody watches"
        clock.wait_for_parked(1)
        clock.advance(OPEN_TIMEOUT_SECONDS)
        assert stranger.cancelled.wait(20.0)
