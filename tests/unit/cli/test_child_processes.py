"""The launcher's child processes, and what the cleanup process is told about them."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ferrorpc.cli.launcher import cleanup
from ferrorpc.cli.launcher.child_processes import Child, ChildProcesses
from ferrorpc.cli.launcher.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from ferrorpc.errors import ConfigError
from tests.waiting import eventually

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """A file in which a slow cleanup process leaves what it was told; no cleanup process does its work."""
    script = tmp_path / "cleanup.py"
    script.write_text(
        "import pathlib, sys, time\nsaid = sys.stdin.read()\ntime.sleep(0.3)\npathlib.Path(sys.argv[1]).write_text(said)\n"
    )
    monkeypatch.setattr(cleanup, "__file__", str(script))
    return tmp_path / "told"


def test_the_cleanup_process_knows_of_each_group_from_start_to_discard_and_is_waited_for(told):
    with ChildProcesses([told]) as children:
        first = children.start(SLEEP, os.environ)
        second = children.start(SLEEP, os.environ)
        children.discard(first)
    assert told.read_text() == f"+{first.pid}\n+{second.pid}\n-{first.pid}\n"


def test_leaving_kills_all_even_without_the_cleanup_process(told):
    with ChildProcesses([told]) as children:
        children = [children.start(SLEEP, os.environ) for _ in range(2)]
    assert [child.stdout.closed for child in children] == [True, True]
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_children_come_and_go_after_someone_killed_the_cleanup_process(monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with ChildProcesses() as children:
        started[0].kill()
        started[0].wait(timeout=30)
        children.discard(children.start(SLEEP, os.environ))


@pytest.mark.parametrize("reason", [errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.E2BIG])
def test_the_limits_are_named_only_where_they_are_why_nothing_can_be_started(monkeypatch, reason):
    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    with ChildProcesses() as children:
        monkeypatch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(ConfigError, match=f"no other can be started: {os.strerror(reason)}") as raised:
            children.start(SLEEP, os.environ)
    assert ("ulimit" in raised.value.hint) is (reason != errno.E2BIG)


def test_a_group_that_became_another_users_is_told_of(monkeypatch):
    def refused(group, number):
        raise PermissionError

    child = Child(["true"], os.environ, stdin=subprocess.DEVNULL)
    assert child.send(signal.SIGTERM)
    monkeypatch.setattr(os, "killpg", refused)
    assert not child.send(signal.SIGTERM)
    child.reap()
    monkeypatch.undo()
    assert child.send(signal.SIGTERM), "an empty group takes any signal"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_before_the_command_has_begun_ends_it_and_nothing_is_said(number):
    """The exec shim would show a traceback of its own imports."""
    with ChildProcesses() as children:
        child = children.start(["sleep", "60"], os.environ)
        eventually(lambda: signals(child.pid, "SigCgt", {signal.SIGINT}) or is_called(child.pid, "sleep"), "it has begun")
        assert child.send(number)
        eventually(lambda: child.poll() is not None, "it ends")
        assert (child.returncode, child.stderr.read()) == (-number, b"")


def is_called(pid, name):
    return Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"


def signals(pid, kind, numbers):
    """Whether these are among the signals of one kind in /proc/PID/status, such as SigBlk."""
    mask = int(re.search(rf"{kind}:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return all(mask >> (number - 1) & 1 for number in numbers)


def test_the_cleanup_process_is_deaf_to_what_ends_the_launcher_from_its_beginning():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with ChildProcesses() as children:
        assert signals(children._cleanup.pid, "SigBlk", (*STOP_SIGNALS, *FORWARDED_SIGNALS))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
