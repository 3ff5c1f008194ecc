"""The log of a job: what happened, as text for the process log, `ferrorpc status` and the status page.

No decision depends on it, and it does not survive a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ferrorpc.v1 import error_pb2, session_pb2
from ferrorpc_coordinator.state.effects import Note
from ferrorpc_coordinator.state.settings import MILLISECOND

OCCURRENCES_MAX = 200
"""Entries kept per job."""


class OccurrenceLog:
    """The last entries of one job's log.

    Args:
        job: the job's name.
        now: returns the current time, in nanoseconds of running time.
        emit: passes a note to the driver, which logs it.
    """

    def __init__(self, job: str, now: Callable[[], int], emit: Callable[[Note], None]) -> None:
        self._job = job
        self._now = now
        self._emit = emit
        self._entries: deque[tuple[int, session_pb2.Occurrence]] = deque(maxlen=OCCURRENCES_MAX)
        """Each with its time."""
        self._count = 0

    def add(
        self,
        kind: str,
        text: str,
        *,
        rank: int = -1,
        generation: int = 0,
        code: error_pb2.ErrorCode.ValueType = error_pb2.ERROR_CODE_UNSPECIFIED,
        state: str = "",
    ) -> None:
        """Adds an entry. `kind` is one of the words listed in session.proto; the rest is as in `Note`."""
        self._count += 1
        text = text[:1024]
        entry = session_pb2.Occurrence(number=self._count, kind=kind, text=text, rank=rank, generation=generation)
        self._entries.append((self._now(), entry))
        self._emit(Note(self._job, kind, text, rank, generation, code, state))

    def status(self) -> list[session_pb2.Occurrence]:
        """The kept entries, oldest first."""
        for at, entry in self._entries:
            entry.age_ms = (self._now() - at) // MILLISECOND
        return [entry for _, entry in self._entries]
