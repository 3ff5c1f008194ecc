"""When the launcher's own coordinator is started again, and when that makes no sense."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ferrorpc.cli.launcher.coordinator import OwnCoordinator


class Nursery:
    """Starts children that end as they are told."""

    def __init__(self) -> None:
        self.started: list[SimpleNamespace] = []
        self.discarded: list[SimpleNamespace] = []

    def start(self, command: list[str], environment: dict[str, str]) -> SimpleNamespace:
        child = SimpleNamespace(returncode=None, poll=lambda: child.returncode)
        self.started.append(child)
        return child

    def discard(self, child: SimpleNamespace) -> None:
        assert child.returncode is not None
        self.discarded.append(child)


@pytest.fixture
def nursery() -> Nursery:
    return Nursery()


def ends_three_times(coordinator: OwnCoordinator, nursery: Nursery, returncode: int) -> None:
    """Three starts in a row end before they listen."""
    for end in range(3):
        nursery.started[-1].returncode = returncode
        assert coordinator.check(float(end)) is not None
        assert coordinator.check(float(end)) is None, "an end is told once"
        coordinator.restart()


@pytest.mark.parametrize(("returncode", "hopeless"), [(64, True), (70, True), (-signal.SIGKILL, False), (0, False)])
def test_one_that_gives_up_three_times_cannot_start_and_one_that_is_killed_can(nursery, returncode, hopeless):
    coordinator = OwnCoordinator(nursery, "127.0.0.1:29700", Path("journal"), {})
    ends_three_times(coordinator, nursery, returncode)
    assert coordinator.cannot_start is hopeless
    assert nursery.discarded == nursery.started[:-1], "nothing is left of those that ended"


def test_one_that_listened_is_started_again_however_often_it_ends(nursery):
    coordinator = OwnCoordinator(nursery, "127.0.0.1:29700", Path("journal"), {})
    for end in range(5):
        coordinator.announced(b"listening 127.0.0.1:29700 cluster 1\n")
        nursery.started[-1].returncode = 70
        assert coordinator.check(float(end)) == "exit code 70"
        assert end < coordinator.deadline <= end + 0.2
        coordinator.restart()
    assert not coordinator.cannot_start


def test_one_that_listened_once_has_a_configuration_that_may_be_right_the_next_time(nursery):
    coordinator = OwnCoordinator(nursery, "127.0.0.1:29700", Path("journal"), {})
    coordinator.announced(b"listening 127.0.0.1:29700 cluster 1\n")
    nursery.started[-1].returncode = 64
    coordinator.check(0.0)
    assert not coordinator.cannot_start


def test_one_that_is_killed_again_and_again_is_waited_for_longer_each_time_up_to_two_seconds(nursery):
    coordinator = OwnCoordinator(nursery, "127.0.0.1:29700", Path("journal"), {})
    delays = []
    for _ in range(7):
        nursery.started[-1].returncode = -signal.SIGKILL
        coordinator.check(100.0)
        delays.append(coordinator.deadline - 100.0)
        coordinator.restart()
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_half_a_line_of_one_that_was_killed_does_not_spoil_the_next_ones(nursery):
    coordinator = OwnCoordinator(nursery, "127.0.0.1:29700", Path("journal"), {})
    coordinator.announced(b"list")
    nursery.started[-1].returncode = -signal.SIGKILL
    coordinator.check(0.0)
    coordinator.restart()
    coordinator.announced(b"listening 127.0.0.1:29700 cluster 1 http 127.0.0.1:29701\n")
    assert (coordinator.has_listened, coordinator.page_address) == (True, "127.0.0.1:29701")
