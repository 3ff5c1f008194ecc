"""The standard input of a single worker, which inherits the launcher's."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launching import environment, write_script
from tests.waiting import eventually

RUN = [sys.executable, "-m", "ferrorpc", "run"]
ECHO = """
    import sys
    print("waiting", flush=True)
    print(repr(sys.stdin.readline()))
"""
READ = """
    import os, sys
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal: the user's, and that of the programs."""
    user, programs = pty.openpty()
    yield user, programs
    os.close(user)
    os.close(programs)


def on_terminal(command: list[str], programs: int) -> subprocess.Popen[str]:
    """Starts a command as the first of a session on this terminal. Its standard output is a pipe."""

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        command, stdin=programs, stdout=subprocess.PIPE, text=True, env=environment(), preexec_fn=take_terminal
    )


def test_one_worker_reads_a_pipe(tmp_path):
    command = [*RUN, "-n", "1", write_script(tmp_path, ECHO)]
    done = subprocess.run(command, input="hello\n", env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["0: waiting", "0: 'hello\\n'"]


def test_one_worker_reads_the_terminal(tmp_path, terminal):
    user, programs = terminal
    with on_terminal([*RUN, "-n", "1", write_script(tmp_path, ECHO)], programs) as process:
        assert process.stdout.readline() == "0: waiting\n"
        os.write(user, b"hello\n")
        assert process.stdout.readline() == "0: 'hello\\n'\n"
    assert process.returncode == 0


def test_ctrl_c_ends_a_worker_that_reads_the_terminal(tmp_path, terminal):
    """It has to be in its read by then: Python misses a signal that comes just before."""
    user, programs = terminal
    with on_terminal([*RUN, "-n", "1", write_script(tmp_path, READ)], programs) as process:
        rank, pid = process.stdout.readline().split()
        assert rank == "0:"
        state = Path("/proc", pid, "stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", "it sleeps in its read")
        os.write(user, b"\x03")
        assert process.wait(timeout=30) == 128 + signal.SIGINT


def test_a_launcher_in_the_background_takes_no_input_from_the_terminal(tmp_path, terminal):
    """Otherwise its worker would take what is typed into the shell."""
    _, programs = terminal
    line = f'set -m; "{sys.executable}" -m ferrorpc run -n 1 "{write_script(tmp_path, ECHO)}" & wait $!'
    with on_terminal(["bash", "-c", line], programs) as process:
        assert process.stdout.read().splitlines() == ["0: waiting", "0: ''"]
    assert process.returncode == 0
