"""The last lines of a run, and the launcher's exit code."""

import signal

import pytest

from ferrorpc.cli.launcher.exit_summary import (
    crash_report,
    exit_reason,
    is_outside,
    is_victim,
    last_exception,
    launcher_exit_code,
    losses_line,
    restart_line,
    victims_line,
    waiting_line,
)
from ferrorpc.cli.launcher.worker_group import Exit, FailurePolicy, Phase, Start, WorkerGroup
from ferrorpc.errors import GroupAbortedError, PeerLostError, StaleGenerationError

POLICY = FailurePolicy()
LABELS = ["0", "1", "2"]
TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: bad batch"]
LOST = [
    "Traceback (most recent call last):",
    "ferrorpc.errors.PeerLostError: rank 2 was lost: SIGKILL",
    "try: call group.reform()",
]


def end(worker, returncode, victim=False, stopped=False):
    return Exit(worker, returncode, victim=victim, outside=False, stopped=stopped)


def test_the_exception_is_found_at_the_end_of_a_traceback():
    assert last_exception(TRACEBACK) == "ValueError: bad batch"
    assert last_exception(LOST) == "PeerLostError: rank 2 was lost: SIGKILL"
    assert last_exception(["ZeroDivisionError"]) == "ZeroDivisionError"
    assert last_exception(["some warning: text", "  ValueError: indented"]) is None
    assert last_exception([]) is None


def test_an_exception_in_colours_is_found_too():
    """Python 3.13 writes it so on terminals, and elsewhere with FORCE_COLOR."""
    coloured = "\x1b[1;35mferrorpc.errors.PeerLostError\x1b[0m: \x1b[35mrank 2 was lost\x1b[0m"
    assert last_exception([coloured]) == "PeerLostError: rank 2 was lost"
    assert is_victim(1, [coloured])


def test_the_last_of_several_exceptions_counts():
    assert last_exception([*TRACEBACK, "During handling", "KeyError: 'x'"]) == "KeyError: 'x'"


def test_who_lost_a_member_is_a_victim():
    assert is_victim(1, LOST)
    assert not is_victim(1, TRACEBACK)
    assert not is_victim(1, [])


def test_who_ended_to_be_tried_again_is_a_victim_unless_it_lacked_something_itself():
    assert is_victim(75, [])
    assert is_victim(75, [*LOST[:1], "ferrorpc.errors.RendezvousTimeoutError: rank 1 did not arrive"])
    assert not is_victim(75, [*LOST[:1], "ferrorpc.errors.ConfigError: 127.0.0.1: every port is in use", "try: something"])
    assert "it was the first to fail" in crash_report(end(1, 75), [], LABELS, [], None)
    assert launcher_exit_code(end(1, 75), 0, clean=False) == 75


@pytest.mark.parametrize("name", ["RendezvousTimeoutError", "StaleGenerationError"])
def test_who_was_not_in_the_world_at_its_end_was_outside(name: str):
    tail = ["  raise", f"ferrorpc.errors.{name}: what happened", "try: something"]
    assert is_outside(1, tail)
    assert is_outside(75, tail)
    assert not is_outside(3, tail)
    assert not is_outside(1, LOST)
    assert not is_outside(1, [])


@pytest.mark.parametrize("returncode", [0, 3, 64, -signal.SIGKILL])
def test_who_chose_an_exit_code_of_its_own_or_was_killed_is_no_victim(returncode):
    assert not is_victim(returncode, LOST)


@pytest.mark.parametrize("kind", [PeerLostError, GroupAbortedError, StaleGenerationError])
def test_every_error_of_the_membership_makes_a_victim(kind):
    assert is_victim(1, [f"{kind.__module__}.{kind.__qualname__}: what happened"])


def test_an_exception_that_says_very_much_is_cut():
    assert last_exception([f"ValueError: {'x' * 5000}"]) == f"ValueError: {'x' * 288}"


def test_exceptions_that_are_not_called_errors_are_found_too():
    assert last_exception(["training.DivergedException: loss is nan"]) == "DivergedException: loss is nan"
    assert last_exception(["Exception: bad batch"]) == "Exception: bad batch"
    assert last_exception(["click.exceptions.Exit: 3"]) == "Exit: 3"
    assert last_exception(["KeyboardInterrupt"]) == "KeyboardInterrupt"


def test_the_reason_is_the_exception_where_there_is_one():
    assert exit_reason(1, TRACEBACK) == "ValueError: bad batch"
    assert [exit_reason(3, []), exit_reason(-9, TRACEBACK), exit_reason(0, TRACEBACK)] == ["", "", ""]


def test_exit_codes():
    assert launcher_exit_code(None, 0, clean=True) == 0
    assert launcher_exit_code(end(1, 3), 0, clean=False) == 3
    assert launcher_exit_code(end(1, -9), 0, clean=False) == 137
    assert launcher_exit_code(end(1, 1, victim=True), 0, clean=False) == 75
    assert launcher_exit_code(end(1, -15, stopped=True), signal.SIGINT, clean=False) == 130
    assert launcher_exit_code(end(1, -15, stopped=True), 0, 64, clean=False) == 64
    assert launcher_exit_code(end(1, -15, stopped=True), signal.SIGINT, 64, clean=False) == 130
    assert launcher_exit_code(None, signal.SIGTERM, clean=True) == 0, "asked to stop, and all stopped well"


def test_the_report_shows_the_first_failure_its_words_and_the_victims_in_one_line():
    others = [end(0, 75, victim=True), end(2, -15, stopped=True), end(3, 75, victim=True)]
    text = crash_report(end(1, 1), others, ["0", "1", "2", "3"], TRACEBACK, "logs/rank1.log")
    assert text.splitlines() == [
        "rank 1 ended with exit code 1; it was the first to fail.",
        "its last 3 lines on standard error:",
        *(f"  | {line}" for line in TRACEBACK),
        "all of its output: logs/rank1.log",
        "then: ranks 0, 3 ended with exit code 75; rank 2 stopped by ferrorpc (SIGTERM)",
    ]


def test_the_first_victim_is_called_so_and_others_are_told_in_order_of_rank():
    text = crash_report(end(1, 75, victim=True), [end(2, 0), end(0, 0)], ["0", "1", "2"], ["one line"], None)
    assert "its last 2 lines on standard error:" in crash_report(end(1, 1), [], ["0", "1"], ["one", "two"], None)
    assert text.splitlines() == [
        "rank 1 ended with exit code 75; it was the first of those that lost a member or the coordinator.",
        "its last line on standard error:",
        "  | one line",
        "then: ranks 0, 2 ended well",
    ]


def test_a_silent_lonely_failure_is_reported_too():
    text = crash_report(end(0, -11), [], ["0"], [], None)
    assert text == "rank 0 ended with SIGSEGV; it was the first to fail.\nit wrote nothing on standard error."


def test_victims_who_ended_well_are_named_as_such():
    assert victims_line([end(0, 0)], ["0", "1"]) == "then: rank 0 ended well"
    assert victims_line([], []) == ""


def test_losses_that_an_elastic_world_survived_are_told():
    assert losses_line([end(0, 0), end(1, -9)], ["0", "1"]) == "rank 1 ended with SIGKILL; the others finished without it"
    lost = losses_line([end(0, 0), end(1, -9), end(2, 3)], ["0", "1", "2"])
    assert lost == "rank 1 ended with SIGKILL; rank 2 ended with exit code 3; the others finished without them"


def test_a_restart_says_who_failed_and_how():
    labels = ["0", "1", "2"]
    told = restart_line(Start((0, 1, 2), 1, end(1, 1)), 3, labels, TRACEBACK)
    assert told == "restart 1 of 3: ranks 0, 1, 2, because rank 1 ended with exit code 1: ValueError: bad batch"
    told = restart_line(Start((2,), 2, end(2, -signal.SIGKILL)), 3, labels, TRACEBACK)
    assert told == "restart 2 of 3: rank 2, because rank 2 ended with SIGKILL"
    assert restart_line(Start((2,), 2), 3, labels, []) == "restart 2 of 3: rank 2"


@pytest.mark.parametrize(
    ("group", "line"),
    [
        (WorkerGroup(3, POLICY, Phase.FAILING, deadline=34.6, alive={1}), "rank 1 to end; SIGTERM follows in 25 s"),
        (WorkerGroup(3, POLICY, Phase.STOPPING, deadline=40.0, alive={0, 2}), "ranks 0, 2 to end; SIGKILL follows in 30 s"),
        (WorkerGroup(3, POLICY, Phase.KILLING, interrupted=2, alive={2}), "rank 2 to end after SIGKILL"),
    ],
    ids=lambda value: value.phase.name if isinstance(value, WorkerGroup) else "",
)
def test_a_wait_for_workers_says_whom_for_and_what_follows(group, line):
    assert waiting_line(group, LABELS, 10.0) == f"waiting for {line}"
