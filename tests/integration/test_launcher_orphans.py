"""Nothing that stayed in its process group outlives the launcher, however that ends."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.launching import (
    alive,
    children_of,
    environment,
    kill_all,
    read_numbers,
    start,
    wait_until_gone,
    write_script,
)
from tests.waiting import eventually

FAMILY = """
    import os, signal, subprocess, sys, time
    stubborn = sys.argv[2] == "stubborn"
    if stubborn:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
    sleep = "import time; time.sleep(120)"
    child = subprocess.Popen([sys.executable, "-c", (ignore + "; " if stubborn else "") + sleep])
    rank = os.environ["RANK"]
    for name, pid in (("worker", os.getpid()), ("child", child.pid)):
        with open(f"{sys.argv[1]}/{name}{rank}", "w") as file:
            file.write(f"{pid}\\n")
    if sys.argv[2] == "leave":
        time.sleep(0.5)
        sys.exit(0)
    time.sleep(120)
"""


@pytest.fixture
def family(tmp_path):
    """Starts two workers with a child each; gives the launcher and all their pids."""
    started = []

    def begin(mode, *flags):
        launcher = start("-n", "2", *flags, write_script(tmp_path, FAMILY), str(tmp_path), mode)
        pids = read_numbers(tmp_path, "worker*", 2) + read_numbers(tmp_path, "child*", 2)
        started.append((launcher, pids))
        return launcher, pids

    yield begin
    for launcher, pids in started:
        launcher.kill()
        launcher.communicate(timeout=60)
        kill_all([pid for pid in pids if alive(pid)])


@pytest.mark.parametrize(("mode", "kill"), [("obedient", os.kill), ("stubborn", os.kill), ("obedient", os.killpg)])
def test_kill_9_of_the_launcher_or_of_its_group_leaves_no_orphan(family, mode, kill):
    launcher, pids = family(mode)
    helpers = children_of(launcher.pid)
    assert len(helpers) >= 4, "two workers, the coordinator and the guard process"
    kill(launcher.pid, signal.SIGKILL)
    assert wait_until_gone([*pids, *helpers]) == []


def test_without_a_guard_process_workers_still_end_with_the_launcher(family, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody is left to remove the launcher's directory
    launcher, pids = family("stubborn")
    helpers = children_of(launcher.pid)
    (guard,) = [pid for pid, command in helpers.items() if "cleanup.py" in command]
    os.kill(guard, signal.SIGKILL)
    launcher.kill()
    assert wait_until_gone([*pids[:2], *helpers]) == []


def test_the_guard_process_outlives_signals_that_everybody_gets(family):
    launcher, pids = family("stubborn")
    helpers = children_of(launcher.pid)
    (guard,) = [pid for pid, command in helpers.items() if "cleanup.py" in command]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(guard, number)
    launcher.kill()
    assert wait_until_gone([*pids, *helpers]) == []


def test_kill_9_of_the_launcher_removes_its_temporary_directory(family, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    launcher, _ = family("obedient")
    assert list(temporary.glob("ferrorpc-*"))
    launcher.kill()
    eventually(lambda: not list(temporary.glob("ferrorpc-*")), "the end of the directory")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_whole_groups_and_gives_128_plus_n(family, number):
    launcher, pids = family("obedient")
    launcher.send_signal(number)
    assert launcher.wait(timeout=60) == 128 + number
    assert wait_until_gone(pids) == []


def test_a_signal_that_was_ignored_where_the_launcher_was_started_stays_ignored(family):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `nohup` and `&` in a script do
    try:
        launcher, pids = family("obedient")
    finally:
        signal.signal(signal.SIGINT, before)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)  # of two that come together the later one may be handled first
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert wait_until_gone(pids) == []


def test_signals_that_were_blocked_where_the_launcher_was_started_reach_it(family):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    try:
        launcher, pids = family("obedient")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert wait_until_gone(pids) == []


def test_a_signal_reaches_the_children_of_workers_as_itself(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("told" if child == 0 else 0))
        child = os.fork()
        open(f"{sys.argv[1]}/{'child' if child == 0 else 'parent'}", "w").write("1\\n")
        if child:
            os.waitpid(child, 0)
        time.sleep(60)
        """,
    )
    launcher = start("-n", "1", script, str(tmp_path))
    read_numbers(tmp_path, "[cp]?*[dt]", 2)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert "0: told\n" in err
    assert err.endswith("ferrorpc: stopped by SIGTERM\n")


SAVING = """
    import os, signal, sys, time

    def save(*_):
        time.sleep(float(sys.argv[2]))
        sys.exit("saved")

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, save)
    open(f"{sys.argv[1]}/{'child' if child == 0 else 'parent'}", "w").write(f"{os.getpid()}\\n")
    time.sleep(60)
"""


def test_what_a_shell_in_between_has_started_gets_its_time_to_save(tmp_path):
    """A shell that gets SIGTERM ends at once."""
    launcher = start("-n", "1", write_script(tmp_path, SAVING), str(tmp_path), "1.0")
    pids = read_numbers(tmp_path, "[cp]?*[dt]", 2)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert err == "0: saved\nferrorpc: stopped by SIGTERM\n"
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize("again", [True, False])
def test_that_time_ends_with_the_second_signal_or_the_shutdown_timeout(tmp_path, again):
    launcher = start(
        "-n", "1", *([] if again else ["--shutdown-timeout", "0.5"]), write_script(tmp_path, SAVING), str(tmp_path), "60"
    )
    pids = read_numbers(tmp_path, "[cp]?*[dt]", 2)
    launcher.send_signal(signal.SIGTERM)
    if again:
        time.sleep(0.3)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert err == "ferrorpc: stopped by SIGTERM\n"
    assert wait_until_gone(pids) == []


def test_the_second_signal_kills_the_stubborn(family):
    launcher, pids = family("stubborn")
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert launcher.poll() is None
    assert all(alive(pid) for pid in pids)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert wait_until_gone(pids) == []


def test_one_signal_kills_the_stubborn_after_the_shutdown_timeout_which_is_told_while_it_lasts(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open(f"{sys.argv[1]}/ready", "w").write(f"{os.getpid()}\\n")
        time.sleep(60)
        """,
    )
    hasty = "import sys; from ferrorpc.cli.launcher import launch; launch._EXPLAIN_SECONDS = 0.1; "
    run = "from ferrorpc.cli.main import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", hasty + run, "run", "--shutdown-timeout", "2", script, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as launcher:
        pids = read_numbers(tmp_path, "ready", 1)
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    assert wait_until_gone(pids) == []
    told = "ferrorpc: waiting for rank 0 to end; SIGKILL follows in [012] s, or at once with the next signal"
    ended = "ferrorpc: stopped by SIGINT\nferrorpc: then: rank 0 stopped by ferrorpc \\(SIGKILL\\)\n"
    assert re.fullmatch(f"{told}\n{ended}", err), err


def test_a_stopped_worker_is_woken_to_be_ended(family):
    launcher, pids = family("obedient")
    os.kill(pids[0], signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)  # which Python handles: the kernel itself ends who is stopped by one that is not
    assert launcher.wait(timeout=60) == 128 + signal.SIGINT
    assert wait_until_gone(pids) == []


def test_what_a_worker_leaves_in_its_group_goes_with_the_launcher(family):
    launcher, pids = family("leave")
    assert launcher.wait(timeout=60) == 0
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_for_the_workers_alone_are_passed_on_and_end_nothing(tmp_path, number):
    """Nor do they reach a worker's own children, such as data loaders, which may run its handler or end."""
    script = write_script(
        tmp_path,
        """
        import os, signal, subprocess, sys
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        signal.pthread_sigmask(signal.SIG_BLOCK, {int(sys.argv[2])})
        with open(f"{sys.argv[1]}/ready{os.environ['RANK']}", "w") as file:
            file.write("1\\n")
        signal.sigwait({int(sys.argv[2])})
        child.communicate()
        print("got it, and the child ended with", child.returncode)
        """,
    )
    launcher = start("-n", "2", script, str(tmp_path), str(int(number)))
    read_numbers(tmp_path, "ready*", 2)
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"{rank}: got it, and the child ended with 0" for rank in range(2)]
    assert launcher.returncode == 0
