"""The coordinator that the launcher starts: a child process with a temporary journal, restarted on its address when it dies."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ferrorpc.cli.launcher.child_processes import REFUSED_SECONDS, Child, ChildProcesses
from ferrorpc.cli.launcher.output import LineBuffer
from ferrorpc.cli.launcher.signals import describe
from ferrorpc.cli.launcher.worker_group import NO_DEADLINE
from ferrorpc.exit_codes import EXIT_CONFIG

_RESTART_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0)
"""How long after each end in a row it is started again; the last one counts for all further ends."""
_FAILED_STARTS_MAX: Final = 3
"""A coordinator that has ended so often, and never listened, is not started again."""
_CRASHES: Final = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals by which a process fails by itself, as gRPC does where it gets no thread."""


class CoordinatorProcess:
    """Keeps one coordinator running on one address. Thanks to its journal, workers do not notice a restart.

    Args:
        data_dir: where it begins its journal; in a temporary directory that `children` removes. Where there is no room for one,
            the coordinator says so, and members do not survive a restart.
        http_port: of its status page; None without one.
    """

    def __init__(
        self,
        children: ChildProcesses,
        address: str,
        data_dir: Path,
        environment: Mapping[str, str],
        http_port: int | None = None,
    ) -> None:
        self._children = children
        # -P: the user's directory must not shadow what the coordinator imports.
        self._command = [sys.executable, "-P", "-m", "ferrorpc_coordinator", "--transient"]
        self._command += ["--listen", address, "--data-dir", str(data_dir)]
        self._command += [] if http_port is None else ["--http-port", str(http_port)]
        # A directory that the user set is for a coordinator that outlives its jobs.
        self._environment = {name: value for name, value in environment.items() if name != "FERRORPC_DATA_DIR"}
        self.page_address = ""
        """host:port of its status page, once it listens; empty without one."""
        self._output = LineBuffer()
        self.has_listened = False
        """Whether it has ever been in service."""
        self._failed_starts = 0
        self._ends = 0
        """Since it last listened."""
        self.restart_at = NO_DEADLINE
        """When it is to be restarted; finite only while it is down."""
        self.child = self._start()

    @property
    def cannot_start(self) -> bool:
        """Whether another restart is pointless. What has listened once may do so again, and workers wait for it as long as they
        are told to."""
        return not self.has_listened and self._failed_starts >= _FAILED_STARTS_MAX

    @property
    def is_told(self) -> bool:
        """Whether to show how it last ended and what it logs: of starts that fail in a row the 1st, 2nd, 4th, 8th and so on."""
        return self._ends & (self._ends - 1) == 0

    def on_output(self, data: bytes) -> None:
        """Takes its standard output. The line "listening ..." says that it is in service."""
        for line in self._output.feed(data):
            if line.startswith(b"listening"):
                self.has_listened = True
                self._ends = 0
                self.page_address = line.partition(b" http ")[2].decode()

    def check(self, now: float) -> str | None:
        """Schedules the restart of a child that was found to have ended. Returns a description of the exit, once."""
        if self.restart_at != NO_DEADLINE or self.child.returncode is None:
            return None
        if self.child.returncode > 0 or -self.child.returncode in _CRASHES:  # one that was killed may well run the next time
            self._failed_starts += _FAILED_STARTS_MAX if self.child.returncode == EXIT_CONFIG else 1
        self.restart_at = now + _RESTART_SECONDS[min(self._ends, len(_RESTART_SECONDS) - 1)]
        self._ends += 1
        return describe(self.child.returncode)

    def restart(self, now: float) -> None:
        """Starts it again on the same address and journal.

        Raises:
            ConfigError: no process can be started now. It is due again after REFUSED_SECONDS.
        """
        self._children.discard(self.child)
        self.restart_at = now + REFUSED_SECONDS
        self.child = self._start()
        self.restart_at = NO_DEADLINE

    def _start(self) -> Child:
        self._output = LineBuffer()
        return self._children.start(self._command, self._environment)
