"""The end of a run: the launcher's exit code, and its last lines, which say who failed first, how, and how the others ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ferrorpc.cli.launcher.signals import describe, exit_code
from ferrorpc.cli.launcher.worker_group import Exit, Phase, Start, WorkerGroup
from ferrorpc.cli.terminal import plain
from ferrorpc.errors import ConfigError
from ferrorpc.exit_codes import EXIT_RETRY

_MEMBERSHIP_ERRORS = ("PeerLostError", "GroupAbortedError", "StaleGenerationError")
_OUTSIDE_ERRORS = ("RendezvousTimeoutError", "StaleGenerationError")
_EXCEPTION_LINE = re.compile(r"(?:[\w.]+\.)?((?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit))(: ?.*)?")
_UNCAUGHT = 1
_REASON_CHARACTERS_MAX = 300
"""A report with a longer one could exceed PIPE_BUF: in JSON a character takes up to 12 bytes."""


def last_exception(tail: Sequence[str]) -> str | None:
    """The exception that ended a Python process, as "ValueError: message", found in the last lines of its standard error."""
    for line in reversed(tail):
        match = _EXCEPTION_LINE.fullmatch(plain(line))
        if match is not None:
            return (match[1] + (match[2] or ""))[:_REASON_CHARACTERS_MAX]
    return None


def is_victim(returncode: int, tail: Sequence[str]) -> bool:
    """Whether a process ended because another member or the coordinator failed.

    Python's code for an uncaught exception leaves that to its last lines. The code for a retry says so itself, unless they tell
    of what this process lacked, such as a free port. Any other code is the script's own.
    """
    if returncode == EXIT_RETRY:
        return _ended_by(tail) != ConfigError.__name__
    return returncode == _UNCAUGHT and _ended_by(tail) in _MEMBERSHIP_ERRORS


def is_outside(returncode: int, tail: Sequence[str]) -> bool:
    """Whether a process ended because it was not admitted to the newest generation, or was left out of it."""
    return returncode in (_UNCAUGHT, EXIT_RETRY) and _ended_by(tail) in _OUTSIDE_ERRORS


def _ended_by(tail: Sequence[str]) -> str:
    """The class of the exception in the last lines of standard error; empty without one."""
    return (last_exception(tail) or "").partition(":")[0]


def exit_reason(returncode: int, tail: Sequence[str]) -> str:
    """The exception to report to the other members; empty if the return code alone explains the exit."""
    return (last_exception(tail) or "") if returncode > 0 else ""


def launcher_exit_code(first: Exit | None, interrupted: int, given_up: int = 0, *, clean: bool) -> int:
    """The launcher's own exit code.

    Args:
        first: the failure that explains the others; None without one.
        interrupted: the signal that asked the launcher to stop, or 0.
        given_up: the code of a job that could not go on whatever its workers did, or 0.
        clean: whether every worker ended with 0.
    """
    if interrupted and not clean:
        return 128 + interrupted
    if given_up:
        return given_up
    if first is None:
        return 0
    return EXIT_RETRY if first.victim else exit_code(first.returncode)


def crash_report(first: Exit, others: Iterable[Exit], labels: Sequence[str], tail: Sequence[str], log: str | None) -> str:
    """The report of a failed run, without a final newline.

    Args:
        first: the first failing worker.
        others: how the other workers ended.
        labels: of the workers, as on the console.
        tail: the last lines of the first one's standard error, which the report shows.
        log: the file with the first one's whole output.
    """
    lost = "the first of those that lost a member or the coordinator" if first.victim else "the first to fail"
    lines = [f"rank {labels[first.worker]} ended with {describe(first.returncode)}; it was {lost}."]
    if tail:
        lines.append(f"its last {len(tail)} lines on standard error:" if len(tail) > 1 else "its last line on standard error:")
        lines += [f"  | {line}" for line in tail]
    else:
        lines.append("it wrote nothing on standard error.")
    if log is not None:
        lines.append(f"all of its output: {log}")
    victims = victims_line(others, labels)
    return "\n".join([*lines, victims] if victims else lines)


def restart_line(start: Start, most: int, labels: Sequence[str], tail: Sequence[str]) -> str:
    """ "restart 1 of 3: ranks 0, 1, because rank 1 ended with exit code 1: ValueError: loss is nan".

    Args:
        most: how many restarts are allowed.
        labels: of the workers, as on the console.
        tail: the last lines on standard error of the worker that caused the restart.
    """
    again = ", ".join(labels[worker] for worker in start.workers)
    line = f"restart {start.attempt} of {most}: rank{'s' * (len(start.workers) > 1)} {again}"
    if start.cause is None:
        return line
    said = exit_reason(start.cause.returncode, tail)
    how = f"rank {labels[start.cause.worker]} ended with {describe(start.cause.returncode)}"
    return f"{line}, because {how}{f': {said}' if said else ''}"


def waiting_line(group: WorkerGroup, labels: Sequence[str], now: float) -> str:
    """For a wait that takes long: "waiting for ranks 0, 2 to end; SIGKILL follows in 25 s"."""
    left = [labels[worker] for worker in sorted(group.alive)]
    line = f"waiting for rank{'s' * (len(left) > 1)} {', '.join(left)} to end"
    if group.phase is Phase.KILLING:
        return f"{line} after SIGKILL"
    number = "SIGTERM" if group.phase is Phase.FAILING else "SIGKILL"
    sooner = ", or at once with the next signal" if group.interrupted else ""
    return f"{line}; {number} follows in {group.deadline - now:.0f} s{sooner}"


def losses_line(exits: Iterable[Exit], labels: Sequence[str]) -> str:
    """For an elastic world that finished: "rank 1 ended with SIGKILL; the others finished without it"."""
    lost = [f"rank {labels[end.worker]} ended with {describe(end.returncode)}" for end in exits if end.returncode != 0]
    return f"{'; '.join(lost)}; the others finished without {'it' if len(lost) == 1 else 'them'}"


def victims_line(others: Iterable[Exit], labels: Sequence[str]) -> str:
    """How the other workers ended, in one line: "then: ranks 0, 3 stopped by ferrorpc; rank 1 exit code 75"."""
    fates: dict[str, list[str]] = {}
    for end in sorted(others, key=lambda end: end.worker):
        fate = "ended well" if end.returncode == 0 else f"ended with {describe(end.returncode)}"
        fates.setdefault(f"stopped by ferrorpc ({describe(end.returncode)})" if end.stopped else fate, []).append(
            labels[end.worker]
        )
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {fate}" for fate, ranks in fates.items()]
    return f"then: {'; '.join(parts)}" if parts else ""
