"""The log of a job: what happened, as text for the process log, `ferrorpc status` and the status page.

No decision depends on it, and it does not survive a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ferrorpc.v1 import error_pb2, session_pb2
from ferrorpc_coordinator.state.effects import Note
from ferrorpc_coordinator.state.settings import MILLISECOND

OCCURRENCES_MAX = 200
"""Entries kept per job."""


class Record(NamedTuple):
    """One entry, with its time in nanoseconds of running time."""

    number: int
    at: int
    note: Note


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
        self._records: deque[Record] = deque(maxlen=OCCURRENCES_MAX)
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
        note = Note(self._job, kind, text[:1024], rank, generation, code, state)
        self._records.append(Record(self._count, self._now(), note))
        self._emit(note)

    def status(self) -> list[session_pb2.Occurrence]:
        """The kept entries, oldest first."""
        now = self._now()
        return [
            session_pb2.Occurrence(
                number=record.number,
                kind=record.note.kind,
                text=record.note.text,
                rank=record.note.rank,
                generation=record.note.generation,
                age_ms=(now - record.at) // MILLISECOND,
            )
            for record in self._records
        ]
