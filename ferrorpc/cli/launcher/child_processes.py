"""The launcher's child processes. Each starts through the exec shim, in a session and process group of its own."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from ferrorpc.cli.launcher import cleanup, exec_shim
from ferrorpc.cli.launcher.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from ferrorpc.errors import ConfigError

REFUSED_SECONDS: Final = 5.0
"""How long the launcher waits before it tries again what it needs for a job that runs, and the system has just refused."""
_CLEANUP_SECONDS = 10.0
_SCARCE = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a limit that fewer processes would keep to."""


class Child:
    """A child process and the process group that it leads.

    Its exit is observed without reaping it. While the zombie exists, the kernel cannot reuse its process id, which is also
    its group's id, so signals to the group reach no unrelated process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, stdin: int | None) -> None:
        self._process = subprocess.Popen(
            exec_shim.tied_to_this_process([*command]),
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self.pid = self._process.pid
        self.returncode: int | None = None
        """As in subprocess: negative for a signal, None while the process runs."""
        self.reaped = False
        """Its process id, and that of its group, may be another's by now."""

    def poll(self) -> int | None:
        """Its return code once it has exited. Does not reap it."""
        if self.returncode is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.returncode = result.si_status if exited else -result.si_status
        return self.returncode

    def send(self, number: int) -> bool:
        """Sends a signal to the whole group. After a stop signal, stopped processes are resumed so that they receive it.

        FORWARDED_SIGNALS are sent to the child alone: its own children, such as data loaders, may have inherited its handler,
        or end for lack of one.

        Returns False where that is not permitted: the group now runs as another user (sudo) and has to end by itself.
        """
        if self.reaped:
            return True
        try:
            (os.kill if number in FORWARDED_SIGNALS else os.killpg)(self.pid, number)
            if number in STOP_SIGNALS:
                os.killpg(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            return True  # the group is empty
        except PermissionError:
            return False
        return True

    def reap(self) -> None:
        """Reaps the process and closes its pipes. Only after the group was killed, or when it is known to be empty."""
        self._process.wait()
        self.reaped = True
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def living_groups() -> frozenset[int]:
    """The process groups with a live process, as far as this user may see them; empty without /proc."""
    found = set()
    for stat in glob.iglob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, group = Path(stat).read_bytes().rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X"):
                found.add(int(group))
    return frozenset(found)


@contextlib.contextmanager
def _blocked(signals: Iterable[int]) -> Iterator[None]:
    """Signals that arrive meanwhile wait until the end. A process that is started meanwhile begins with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ChildProcesses:
    """Starts child processes and makes sure that none outlives the launcher. A context manager: its exit kills those left.

    Args:
        directories: temporary directories, still empty, that are removed when the launcher ends.

    Raises:
        ConfigError: no further process can be started, or no descriptors are left.
    """

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._children: list[Child] = []
        try:
            with self._starting(), _blocked((*STOP_SIGNALS, *FORWARDED_SIGNALS)):
                self._cleanup = subprocess.Popen(
                    [sys.executable, "-I", "-S", cleanup.__file__, *map(str, directories)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    bufsize=0,
                )
        except ConfigError:
            for directory in directories:
                directory.rmdir()
            raise

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, stdin: int | None = subprocess.DEVNULL) -> Child:
        """Starts a child. Call it on the main thread: PR_SET_PDEATHSIG applies to the thread that started the child.

        Args:
            stdin: as in subprocess; None inherits the launcher's.

        Raises:
            ConfigError: no further process can be started, or no descriptors are left.
        """
        with self._starting(), _blocked(STOP_SIGNALS):
            child = Child(command, environment, stdin=stdin)
        self._children.append(child)
        self._tell_cleanup(f"+{child.pid}\n")
        return child

    def discard(self, child: Child) -> None:
        """Kills what is left of a child's process group and reaps the child. Idempotent."""
        if child.reaped:
            return
        child.send(signal.SIGKILL)
        self._tell_cleanup(f"-{child.pid}\n")
        self._children.remove(child)
        child.reap()

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = f"see that {sys.executable} can be run, and give it fewer or shorter arguments and variables"
            if error.errno in _SCARCE:
                hint = "ask for fewer workers, or allow more descriptors and processes (ulimit -n, ulimit -u)"
            what = f"beside {len(self._children)} processes no other can be started: {error.strerror}"
            raise ConfigError(what, hint=hint) from None

    def _tell_cleanup(self, line: str) -> None:
        assert self._cleanup.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the cleanup process was killed; PR_SET_PDEATHSIG and __exit__ still apply
            self._cleanup.stdin.write(line.encode())

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)
        assert self._cleanup.stdin is not None
        self._cleanup.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # on a slow file system it finishes on its own
            self._cleanup.wait(timeout=_CLEANUP_SECONDS)
        for child in self._children:
            child.reap()
