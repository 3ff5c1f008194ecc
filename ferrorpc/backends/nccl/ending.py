"""How communicators end: at once and without mercy when the generation is over, in order when the group is closed.

A generation's end reaches this rank through its latch: a member died, a call did not match, a deadline passed. NCCL's kernels
know nothing of it and spin on, so every communicator is aborted. NCCL's abort has been known to hang; a process whose abort
does so holds a GPU that nobody can use, and nothing within it can mend that. So past a budget the process ends, with the exit
code that launchers take for "start me again".
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from ferrorpc.backends.nccl.api import Communicator, State
from ferrorpc.errors import FerroError
from ferrorpc.guard import Clock, Latch

ABORT_SECONDS: Final = 10.0
"""How long an abort may take."""
CLOSE_SECONDS: Final = 0.8
EXIT_CODE: Final = 75
"""Membership lost: start again."""
LOOK_SECONDS: Final = 1e-3
_log = logging.getLogger("ferrorpc.backends.nccl")


class Ending:
    """Watches over the communicators of one generation.

    Args:
        latch: trips when the generation ends.
        on_device: makes the rank's GPU the current one, as a context.
        abort_seconds: how long aborting may take before the process ends.
        leave: ends the process with an exit code.
    """

    def __init__(
        self,
        clock: Clock,
        latch: Latch,
        on_device: Callable[[], AbstractContextManager[Any]],
        *,
        abort_seconds: float = ABORT_SECONDS,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._clock = clock
        self._latch = latch
        self._on_device = on_device
        self._seconds = abort_seconds
        self._leave = leave
        self._lock = threading.Lock()
        self._communicators: list[Communicator] = []
        self._ended = False
        self._over = False
        latch.watch(self._broken)

    def add(self, communicator: Communicator) -> None:
        """One more; aborted at once where the generation has ended already."""
        with self._lock:
            self._communicators.append(communicator)
            late = self._ended
        if late:
            self._start_abort([communicator])

    def communicators(self) -> list[Communicator]:
        """Those that have not ended, the latest first: those that were split from others before these."""
        with self._lock:
            return self._communicators[::-1]

    def _broken(self) -> None:
        with self._lock:
            self._ended = True
            mine = list(self._communicators)
        if mine:
            self._start_abort(mine)

    def _start_abort(self, communicators: Sequence[Communicator]) -> None:
        self._clock.call_at(self._clock.now() + self._seconds, self._check)
        self._clock.start(lambda: self._abort(communicators), "ferrorpc-nccl-abort")

    def _abort(self, communicators: Sequence[Communicator]) -> None:
        for communicator in communicators:
            try:
                with self._on_device():
                    communicator.abort()
            except FerroError as error:
                _log.warning("aborting a communicator of NCCL's: %s", error.message)
        self._over = True

    def _check(self) -> None:
        if not self._over:
            _log.critical(
                "NCCL's abort did not return within %g s after the generation ended (%s); the process ends with code %d",
                self._seconds,
                self._latch.cause.message if self._latch.cause is not None else "closed",
                EXIT_CODE,
            )
            self._leave(EXIT_CODE)

    def close(self, communicators: Sequence[Communicator], until: float) -> None:
        """Finalizes and destroys them; what is not through by clock time `until` is aborted. For the normal end."""
        parker = self._clock.parker()
        for communicator in communicators:
            try:
                with self._on_device():
                    communicator.finalize()
                    while (state := communicator.state()) is State.IN_PROGRESS and self._clock.now() < until:
                        parker.park(self._clock.now() + LOOK_SECONDS)
                    if state is State.SUCCESS:
                        communicator.destroy()
                    else:
                        self._start_abort([communicator])
            except FerroError as error:
                _log.debug("closing a communicator of NCCL's: %s", error.message)
            with self._lock:
                if communicator in self._communicators:
                    self._communicators.remove(communicator)
