"""A trace of a process's operations in a file that chrome://tracing and ui.perfetto.dev show (FERRORPC_TRACE_DIR).

Every operation is a span from its call to its end. Spans of asynchronous operations overlap, so each has an id of its own (the
format's "async" events). Training steps are counters. Times are the system clock's at the start of the process plus a monotonic
clock since then, so that the traces of a job's ranks can be loaded together.

A thread flushes the file once a second, so a process that is killed leaves all but its last second, also where it hung before.
The closing bracket of the array is then missing, which both viewers accept. A full disk ends the trace, not the program.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from ferrorpc.config import host_name
from ferrorpc.errors import ConfigError
from ferrorpc.guard import SYSTEM_CLOCK

MICROSECONDS: Final = 1e6
_FLUSH_SECONDS: Final = 1.0
_NO_RANK: Final = -1
_log = logging.getLogger("ferrorpc.trace")


def _created(directory: Path, stem: str) -> tuple[Path, TextIO]:
    """A new file of this name, or of one with a number. No other file is overwritten, also none of another host's process."""
    for number in itertools.count(1):
        path = directory / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        with contextlib.suppress(FileExistsError):
            return path, path.open("x", encoding="utf-8")
    raise AssertionError


class TraceFile:
    """The trace file of one process, `<host>-<pid>.json`. Process numbers in it are world ranks.

    Where that file exists already, a number follows: a container that restarts has its host name and process id again.

    Args:
        directory: created if it is missing.

    Raises:
        ConfigError: no file can be written there.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self.path, self._file = _created(Path(directory), f"{host_name()}-{os.getpid()}")
        except OSError as problem:
            raise ConfigError(
                f"FERRORPC_TRACE_DIR={directory}: {problem.strerror or problem}", hint="name a directory to write to"
            ) from None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._opening = "["
        self._numbers = itertools.count(1)
        self._rank = _NO_RANK
        self._epoch = time.time() - time.monotonic()
        self._ended = threading.Event()
        atexit.register(self.close)
        empty = weakref.WeakMethod(self._flush)  # otherwise a forked child would write its copy of the buffer, too
        os.register_at_fork(before=lambda: (method := empty()) and method())
        SYSTEM_CLOCK.start(self._flush_until_the_end, "ferrorpc-trace")

    def writes_to(self, directory: str | None) -> bool:
        """Whether this is an open trace of this process in that directory."""
        return not self._file.closed and self._owner == os.getpid() and self._directory == directory

    def begin(self, label: str, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        """An operation begins. Returns its span, for `end`."""
        span = {
            "cat": "operation",
            "id2": {"local": str(next(self._numbers))},
            "tid": 0,
            "pid": attributes["ferrorpc.world_rank"],
            "name": operation_of(label),
        }
        self._write({**span, "ph": "b", "ts": self._now(), "args": {"operation": label, **attributes}})
        return span

    def end(self, span: Mapping[str, Any], label: str, seconds: float, failure: str) -> None:
        """The operation has ended; `failure` is the name of its error's class."""
        self._write({**span, "ph": "e", "ts": self._now(), "args": {"error": failure} if failure else {}})

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step has ended."""
        parts = {"compute": compute_seconds, "exposed": exposed_seconds, "hidden": hidden_seconds}
        self._write({"ph": "C", "name": "step, seconds", "pid": max(self._rank, 0), "tid": 0, "ts": self._now(), "args": parts})

    def _write(self, event: Mapping[str, Any]) -> None:
        def write() -> None:
            if event["pid"] != self._rank and event["ph"] != "C":
                self._rank = event["pid"]
                self._line({"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}})
            self._line(event)

        self._use(write)

    def _line(self, event: Mapping[str, Any]) -> None:
        self._file.write(f"{self._opening}\n{json.dumps(event)}")
        self._opening = ","

    def _flush_until_the_end(self) -> None:
        while not self._ended.wait(_FLUSH_SECONDS):
            self._flush()

    def _flush(self) -> None:
        self._use(self._file.flush)

    def close(self) -> None:
        """Closes the file. Idempotent; does nothing in a forked child."""
        self._use(self._end)
        atexit.unregister(self.close)

    def _end(self) -> None:
        self._ended.set()
        self._file.write(f"{'' if self._opening == ',' else '['}\n]\n")
        self._file.close()

    def _use(self, action: Callable[[], None]) -> None:
        """Holds the lock while it does this with an open file of this process. Closes a file that cannot be written to, with a
        warning, instead of failing what it records."""
        if os.getpid() != self._owner:
            return
        problem: OSError | None = None
        with self._lock:
            try:
                if not self._file.closed:
                    action()
            except OSError as error:
                problem = error
                self._ended.set()
                with contextlib.suppress(OSError):
                    self._file.close()
        if problem is not None:  # without the lock, which a log handler may need
            _log.warning("the trace %s ends here: %s", self.path, problem.strerror or problem)

    def _now(self) -> float:
        """Microseconds since 1970."""
        return (self._epoch + time.monotonic()) * MICROSECONDS


def operation_of(label: str) -> str:
    """ "all_reduce" of "all_reduce(op=sum, float32[4]) #7"."""
    return label.partition("(")[0]
