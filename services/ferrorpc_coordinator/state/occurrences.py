"""What happened to a job, in words for people: the log, `ferrorpc status` and the status page emit it.

Nothing is decided by what is written here, and nothing of it survives a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ferrorpc.v1 import session_pb2
from ferrorpc_coordinator.state.effects import Note
from ferrorpc_coordinator.state.settings import MILLISECOND

OCCURRENCES_MAX = 200
"""How many a job remembers."""


class Record(NamedTuple):
    """One occurrence, and when it was, in lived nanoseconds."""

    number: int
    at: int
    note: Note


class OccurrenceLog:
    """The last occurrences of one job.

    Args:
        job: its name.
        now: the present, in lived nanoseconds.
        emit: hands a note to the process, which logs and counts it.
    """

    def __init__(self, job: str, now: Callable[[], int], emit: Callable[[Note], None]) -> None:
        self._job = job
        self._now = now
        self._emit = emit
        self._records: deque[Record] = deque(maxlen=OCCURRENCES_MAX)
        self._count = 0

    def add(self, kind: str, text: str, *, rank: int = -1, generation: int = 0) -> None:
        """Something happened. `kind` is one of the words that session.proto lists."""
        self._count += 1
        note = Note(self._job, kind, text[:1024], rank, generation)
        self._records.append(Record(self._count, self._now(), note))
        self._emit(note)

    def status(self) -> list[session_pb2.Occurrence]:
        """All that is remembered, oldest first."""
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
