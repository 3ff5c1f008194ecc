"""Lets the process exit only when no communicator is being freed, because an exit takes CUDA down under the calls for that.

Communicators are freed on threads of their own, because it may take long, or hang. With NCCL 2.28 on an H100 it took some
0.2 s for each, so a program that closed a group with several subgroups ended with SIGSEGV.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

EXIT_SECONDS: Final = 10.0
"""How long an exit waits. NCCL's calls have been known to hang."""


class Freeing:
    """Counts the calls that are under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_over = False

    @contextmanager
    def begun(self) -> Iterator[bool]:
        """A context for a call that frees a communicator. It says whether the call may be made: not once the process exits,
        which frees everything."""
        with self._changed:
            may_run = not self._is_over
            self._running += may_run
        try:
            yield may_run
        finally:
            with self._changed:
                self._running -= may_run
                self._changed.notify_all()

    def end(self) -> None:
        """Waits until none is under way, for EXIT_SECONDS at most, and lets no other begin."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, EXIT_SECONDS)
            self._is_over = True


FREEING: Final = Freeing()
atexit.register(FREEING.end)
