"""The launcher's child processes, and what the cleanup process is told about them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ferrorpc.cli.launcher import cleanup
from ferrorpc.cli.launcher.child_processes import Child, ChildProcesses

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


def test_the_cleanup_process_is_deaf_to_what_ends_the_launcher_from_its_beginning():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with ChildProcesses() as children:
        status = Path(f"/proc/{children._cleanup.pid}/status").read_text()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    mask = int(re.search(r"SigBlk:\s*([0-9a-f]+)", status)[1], 16)
    assert all(mask >> (number - 1) & 1 for number in cleanup.IGNORED)
