"""A trace of a process's operations in a file that chrome://tracing and ui.perfetto.dev show (FERRORPC_TRACE_DIR).

Every operation is a span from its call to its end. Spans may overlap, since asynchronous operations do, so each has a number of
its own (the format's "async" events). Training steps are counters. Times are the system clock's when the process began, and
steady from there, so that the traces of a job's ranks can be loaded together.

The file grows as things happen: a process that is killed leaves what it had done about a second before. It is an array from
whose end a bracket may be missing then, which both viewers accept.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ferrorpc.errors import ConfigError

MICROSECONDS: Final = 1e6
_FLUSH_SECONDS: Final = 1.0
_NO_RANK: Final = -1


class TraceFile:
    """What one process writes, into `<host>-<pid>.json`. The numbers of its processes are world ranks.

    Args:
        directory: made if it is missing.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.path = Path(directory) / f"{socket.gethostname()}-{os.getpid()}.json"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
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
        self._flushed = time.monotonic()
        atexit.register(self.close)
        empty = weakref.WeakMethod(self._empty)
        os.register_at_fork(before=lambda: (method := empty()) and method())

    def goes_to(self, directory: str | None) -> bool:
        """Whether this process's trace for that directory is this one."""
        return not self._file.closed and self._owner == os.getpid() and self._directory == directory

    def begin(self, label: str, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        """An operation begins now; what is returned goes to `end`."""
        span = {
            "cat": "operation",
            "id2": {"local": str(next(self._numbers))},
            "tid": 0,
            "pid": attributes["ferrorpc.world_rank"],
            "name": label.partition("(")[0],
        }
        self._write({**span, "ph": "b", "ts": self._now(), "args": {"operation": label, **attributes}})
        return span

    def end(self, span: Mapping[str, Any], label: str, seconds: float, failure: str = "") -> None:
        """The operation is over; `failure` is the name of its error's class."""
        self._write({**span, "ph": "e", "ts": self._now(), "args": {"error": failure} if failure else {}})

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step is over."""
        parts = {"compute": compute_seconds, "exposed": exposed_seconds, "hidden": hidden_seconds}
        self._write({"ph": "C", "name": "step, seconds", "pid": max(self._rank, 0), "tid": 0, "ts": self._now(), "args": parts})

    def _write(self, event: Mapping[str, Any]) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._file.closed:
                return
            if event["pid"] != self._rank and event["ph"] != "C":
                self._rank = event["pid"]
                self._line({"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}})
            self._line(event)
            now = time.monotonic()
            if now - self._flushed >= _FLUSH_SECONDS:
                self._flushed = now
                self._file.flush()

    def _empty(self) -> None:
        """Before a fork: what the child inherits in the buffer it would write once more."""
        if os.getpid() == self._owner:
            with self._lock:
                if not self._file.closed:
                    self._file.flush()

    def _line(self, event: Mapping[str, Any]) -> None:
        self._file.write(f"{self._opening}\n{json.dumps(event)}")
        self._opening = ","

    def close(self) -> None:
        """Ends the file. Idempotent; a forked child leaves its parent's alone."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if not self._file.closed:
                self._file.write(f"{'' if self._opening == ',' else '['}\n]\n")
                self._file.close()
        atexit.unregister(self.close)

    def _now(self) -> float:
        """Microseconds since 1970."""
        return (self._epoch + time.monotonic()) * MICROSECONDS
