"""Children of the launcher, and the guard process that is told of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ferrorpc.cli.launcher import guardian
from ferrorpc.cli.launcher.child import Child, Nursery

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """A file in which a slow guard process leaves what it was told; no guard process does its work."""
    script = tmp_path / "guardian.py"
    script.write_text(
        "import pathlib, sys, time\nsaid = sys.stdin.read()\ntime.sleep(0.3)\npathlib.Path(sys.argv[1]).write_text(said)\n"
    )
    monkeypatch.setattr(guardian, "__file__", str(script))
    return tmp_path / "told"


def test_the_guard_process_knows_of_each_group_from_start_to_discard_and_is_waited_for(told):
    with Nursery([told]) as nursery:
        first = nursery.start(SLEEP, os.environ)
        second = nursery.start(SLEEP, os.environ)
        nursery.discard(first)
    assert told.read_text() == f"+{first.pid}\n+{second.pid}\n-{first.pid}\n"


def test_leaving_kills_all_even_where_nobody_guards(told):
    with Nursery([told]) as nursery:
        children = [nursery.start(SLEEP, os.environ) for _ in range(2)]
    assert [child.stdout.closed for child in children] == [True, True]
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_children_come_and_go_after_someone_killed_the_guard_process(monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with Nursery() as nursery:
        started[0].kill()
        started[0].wait(timeout=30)
        nursery.discard(nursery.start(SLEEP, os.environ))


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
