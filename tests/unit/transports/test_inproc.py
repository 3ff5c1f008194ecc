"""A rank of an in-process world gets what one peer sends to it in order: before it joins, meanwhile, and with delays."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ferrorpc.guard import SYSTEM_CLOCK, Clock, Latch
from ferrorpc.testing import FaultPlan, ManualClock, run_world
from ferrorpc.transports.inproc import InprocTransport, Network
from ferrorpc.transports.mailbox import Mailbox


def test_what_is_sent_while_a_rank_joins_comes_after_what_was_sent_before() -> None:
    """A rank that reforms a little later than its peer."""
    network = Network(SYSTEM_CLOCK, None, 0)
    taken: list[int] = []

    def send_another(end: InprocTransport) -> None:
        peer = threading.Thread(target=network.arrive, args=(1, lambda end: taken.append(3)))
        peer.start()
        peer.join(5.0)
        taken.append(1)

    network.arrive(1, send_another)
    network.arrive(1, lambda end: taken.append(2))
    lost: list[Any] = []
    mailbox = Mailbox(1, lost.append)
    end = InprocTransport(1, 2, network, mailbox, Latch(), lambda peer, reason: lost.append(reason))
    network.arrive(1, lambda end: taken.append(4))
    assert (taken, lost) == ([1, 2, 3, 4], [])
    end.close(1.0)


@pytest.mark.parametrize("clock", [None, SYSTEM_CLOCK], ids=["virtual", "real"])
def test_delayed_messages_of_one_pair_stay_in_order(clock: Clock | None) -> None:
    """The timers of a real clock are threads, and those of one moment run in any order."""
    count = 60

    def body(group: Any) -> list[int]:
        if group.rank == 0:
            for number in range(count):
                group.send(np.array([number]), 1)
            return []
        return [int(group.recv(0)[0]) for _ in range(count)]

    for seed in range(3):
        found = run_world(2, body, faults=FaultPlan(delay_seconds=(0.0, 0.002)), seed=seed, clock=clock)
        assert found[1] == list(range(count))


def test_a_delayed_message_that_fails_holds_up_no_other() -> None:
    class Late:
        def delay(self, random: Any, source: int, target: int) -> float:
            return 0.001

    class ByHand:
        """A clock whose timers the test strikes, the latest first."""

        def __init__(self) -> None:
            self.timers: list[Any] = []

        def now(self) -> float:
            return 0.0

        def call_at(self, when: float, action: Any) -> None:
            self.timers.append(action)

    clock, came = ByHand(), list[int]()

    def fails() -> None:
        came.append(2)
        raise ValueError("bad bytes")

    network = Network(clock, Late(), 0)  # type: ignore[arg-type]
    for action in (lambda: came.append(1), fails, lambda: came.append(3)):
        network.carry(0, 1, action)
    clock.timers.pop()()
    with pytest.raises(ValueError, match="bad bytes"):
        clock.timers.pop()()
    clock.timers.pop()()
    assert came == [1, 2, 3]


def test_a_message_that_another_one_of_its_pair_sets_off_arrives_after_it_on_the_same_thread() -> None:
    clock, came = ManualClock(), list[str]()
    network = Network(clock, FaultPlan(delay_seconds=(0.001, 0.001)), 0)

    def first() -> None:
        clock.call_at(0.0, lambda: came.append("a timer"))  # which fires what is due, the second message too
        came.append("first")

    network.carry(0, 1, first)
    network.carry(0, 1, lambda: came.append("second"))
    clock.advance(1.0)
    assert came == ["a timer", "first", "second"]
