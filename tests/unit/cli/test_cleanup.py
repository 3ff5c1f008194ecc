"""The functions of the cleanup process; tests/integration/test_launcher_orphans.py kills a real launcher."""

import os
import signal
import subprocess
import sys

from ferrorpc.cli.launcher.cleanup import clean_up, groups_left


def test_groups_that_were_taken_back_are_not_listed():
    assert groups_left(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}


def test_a_group_that_runs_as_another_user_keeps_nothing_else_from_being_cleaned_up(tmp_path, monkeypatch):
    killed = []

    def killpg(group, number):
        if group == 1:
            raise PermissionError
        killed.append(group)

    monkeypatch.setattr(os, "killpg", killpg)
    directory = tmp_path / "journal"
    directory.mkdir()
    clean_up([1, 2], [str(directory)])
    assert (killed, directory.exists()) == ([2], False)


def test_clean_up_kills_whole_groups_and_removes_directories(tmp_path):
    directory = tmp_path / "journal"
    directory.mkdir()
    (directory / "file").write_text("x")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait(timeout=30)
    clean_up([gone.pid, os.getpgid(child.pid)], [str(directory), str(tmp_path / "never was")])
    assert child.wait(timeout=30) == -signal.SIGKILL
    assert not directory.exists()
