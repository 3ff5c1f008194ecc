"""Child processes of the launcher: each behind the shim, in a session and process group of its own, known to the guardian."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from ferrorpc.cli.launcher import guardian, shim
from ferrorpc.cli.launcher.signals import STOPS
from ferrorpc.errors import ConfigError

_ISOLATED_PYTHON = (sys.executable, "-I", "-S")
_GUARDIAN_SECONDS = 10.0


class Child:
    """A running process and whatever stays in its group.

    Its exit is observed without being reaped: while the zombie is there its process id, and so its group's id, cannot be
    given to a stranger, and signals to the group stay safe.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, stdin: int) -> None:
        self._process = subprocess.Popen(
            [*_ISOLATED_PYTHON, shim.__file__, str(os.getpid()), *command],
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        self.returncode: int | None = None
        """As in subprocess, negative for a signal; None while it runs."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe to it, when it was started with one."""
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """Its standard error."""
        assert self._process.stderr is not None
        return self._process.stderr

    def poll(self) -> int | None:
        """Its return code once it has ended, without reaping it."""
        if self.returncode is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.returncode = result.si_status if exited else -result.si_status
        return self.returncode

    def send(self, number: int) -> bool:
        """Sends a signal to the whole group. A stopped process is woken up to take one that asks it to end.

        Returns whether that is allowed: a group that became another user's (sudo) has to end by itself.
        """
        try:
            os.killpg(self.pid, number)
            if number in STOPS:
                os.killpg(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            return True  # the group is empty
        except PermissionError:
            return False
        return True

    def reap(self) -> None:
        """Gives its process id back. Only when the group was killed or is known to be empty."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def living_groups() -> frozenset[int]:
    """The process groups that somebody is alive in, as far as this user may know; empty where there is no /proc."""
    found = set()
    for stat in glob.iglob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is gone
            state, _, group = Path(stat).read_bytes().rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X"):
                found.add(int(group))
    return frozenset(found)


class Nursery:
    """Starts children and makes sure that none outlives the launcher. A context manager; leaving it kills what is left.

    Args:
        directories: temporary directories, still empty, that go with the launcher.

    Raises:
        ConfigError: the machine gives no more processes or descriptors.
    """

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._children: list[Child] = []
        try:
            with self._starting():
                self._guardian = subprocess.Popen(
                    [*_ISOLATED_PYTHON, guardian.__file__, *map(str, directories)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    bufsize=0,
                )
        except ConfigError:
            for directory in directories:
                directory.rmdir()
            raise

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, stdin: int = subprocess.DEVNULL) -> Child:
        """A new child. To be called on the main thread: the shim's death signal follows the thread that started it.

        Raises:
            ConfigError: the machine gives no more processes or descriptors.
        """
        with self._starting():
            child = Child(command, environment, stdin=stdin)
        self._children.append(child)
        self._tell(f"+{child.pid}\n")
        return child

    def discard(self, child: Child) -> None:
        """Kills what is left of a child's group and forgets it."""
        child.send(signal.SIGKILL)
        self._tell(f"-{child.pid}\n")
        self._children.remove(child)
        child.reap()

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"beside {len(self._children)} processes no other can be started: {error.strerror}",
                hint="ask for fewer workers, or allow more descriptors and processes (ulimit -n, ulimit -u)",
            ) from None

    def _tell(self, line: str) -> None:
        assert self._guardian.stdin is not None
        try:
            self._guardian.stdin.write(line.encode())
        except BrokenPipeError:
            return  # someone killed the guardian: the shim's death signal and __exit__ remain

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself, if a file system is slow
            self._guardian.wait(timeout=_GUARDIAN_SECONDS)
        for child in self._children:
            child.reap()
