"""When the launcher's own coordinator is restarted, and when it is not."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ferrorpc.cli.launcher.coordinator_process import CoordinatorProcess


class ChildProcesses:
    """Starts children that end as they are told."""

    def __init__(self) -> None:
        self.started: list[SimpleNamespace] = []
        self.discarded: list[SimpleNamespace] = []

    def start(self, command: list[str], environment: dict[str, str]) -> SimpleNamespace:
        child = SimpleNamespace(returncode=None, poll=lambda: child.returncode, command=command, environment=environment)
        self.started.append(child)
        return child

    def discard(self, child: SimpleNamespace) -> None:
        assert child.returncode is not None
        self.discarded.append(child)


@pytest.fixture
def children() -> ChildProcesses:
    return ChildProcesses()


def ends_three_times(coordinator: CoordinatorProcess, children: ChildProcesses, returncode: int) -> None:
    """Three starts in a row end before they listen."""
    for end in range(3):
        children.started[-1].returncode = returncode
        assert coordinator.check(float(end)) is not None
        assert coordinator.check(float(end)) is None, "an end is told once"
        coordinator.restart(0.0)


@pytest.mark.parametrize(
    ("returncode", "hopeless"),
    [(64, True), (70, True), (-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGKILL, False), (0, False)],
)
def test_one_that_gives_up_three_times_cannot_start_and_one_that_is_killed_can(children, returncode, hopeless):
    coordinator = CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {})
    ends_three_times(coordinator, children, returncode)
    assert coordinator.cannot_start is hopeless
    assert children.discarded == children.started[:-1], "nothing is left of those that ended"


def test_its_journal_is_the_launchers_whatever_the_variable_says(children):
    CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {"FERRORPC_DATA_DIR": "elsewhere", "PATH": "/bin"})
    (child,) = children.started
    assert child.environment == {"PATH": "/bin"}
    assert child.command[-2:] == ["--data-dir", "journal"]


@pytest.mark.parametrize("returncode", [64, 70, -signal.SIGSEGV])
def test_one_that_listened_is_started_again_however_often_it_cannot(children, returncode):
    """As while somebody has its port for the page, or its journal is damaged: the workers may still end well."""
    coordinator = CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {})
    coordinator.on_output(b"listening 127.0.0.1:29700 cluster 1\n")
    ends_three_times(coordinator, children, returncode)
    ends_three_times(coordinator, children, returncode)
    assert not coordinator.cannot_start


def test_starts_that_fail_in_a_row_are_told_less_and_less_often(children):
    coordinator = CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {})
    for _ in range(2):
        coordinator.on_output(b"listening 127.0.0.1:29700 cluster 1\n")
        told = []
        for end in range(1, 20):
            children.started[-1].returncode = 70
            coordinator.check(0.0)
            told += [end] * coordinator.is_told
            coordinator.restart(0.0)
        assert told == [1, 2, 4, 8, 16]
    coordinator.on_output(b"listening 127.0.0.1:29700 cluster 1\n")
    assert coordinator.is_told


def test_one_that_listened_is_started_again_however_often_it_ends(children):
    coordinator = CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {})
    for end in range(5):
        coordinator.on_output(b"listening 127.0.0.1:29700 cluster 1\n")
        children.started[-1].returncode = 70
        assert coordinator.check(float(end)) == "exit code 70"
        assert end < coordinator.restart_at <= end + 0.2
        coordinator.restart(0.0)
    assert not coordinator.cannot_start


def test_one_that_is_killed_again_and_again_is_waited_for_longer_each_time_up_to_two_seconds(children):
    coordinator = CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {})
    delays = []
    for _ in range(7):
        children.started[-1].returncode = -signal.SIGKILL
        coordinator.check(100.0)
        delays.append(coordinator.restart_at - 100.0)
        coordinator.restart(0.0)
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_half_a_line_of_one_that_was_killed_does_not_spoil_the_next_ones(children):
    coordinator = CoordinatorProcess(children, "127.0.0.1:29700", Path("journal"), {})
    coordinator.on_output(b"list")
    children.started[-1].returncode = -signal.SIGKILL
    coordinator.check(0.0)
    coordinator.restart(0.0)
    coordinator.on_output(b"listening 127.0.0.1:29700 cluster 1 http 127.0.0.1:29701\n")
    assert (coordinator.has_listened, coordinator.page_address) == (True, "127.0.0.1:29701")
