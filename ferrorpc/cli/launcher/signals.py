"""Signals that wake the launcher's event loop, which can select on them as on any pipe."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final

from ferrorpc.cli.launcher import exec_shim

STOP_SIGNALS: Final = exec_shim.STOP_SIGNALS
"""Stop the job: the first is forwarded to the workers and their children, the second kills them."""
FORWARDED_SIGNALS: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Only forwarded, and to the workers alone: they have a meaning for their scripts (SLURM warns with them)."""


class SignalInbox:
    """Collects signals while it is open.

    A signal that was ignored before (nohup, `&`) stays ignored. Blocked signals are unblocked, here and in all children:
    without SIGCHLD no exit would be seen, without SIGTERM nothing could be stopped.

    Args:
        on_stop: called in the signal handler of each of STOP_SIGNALS, even while the main thread is busy elsewhere.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._arrived: list[int] = []
        self._before: dict[int, signal._HANDLER] = {}
        self._wakeup_before = -1
        self._mask_before: set[int] = set()

    def fileno(self) -> int:
        """For select: readable when a signal has arrived."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The signals that have arrived since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)  # first: a signal that arrives from here on makes it readable again
        arrived, self._arrived = self._arrived, []
        return arrived

    def __enter__(self) -> SignalInbox:
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signals = (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGCHLD)
        for number in signals:
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The interpreter has already written to the socket, which may be full by now: it only wakes."""
        self._arrived.append(number)
        if number in STOP_SIGNALS:
            self._on_stop()


def describe(returncode: int) -> str:
    """ "exit code 3", or "SIGKILL" for -9."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def exit_code(returncode: int) -> int:
    """The shell's convention: a process's own code, or 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode
