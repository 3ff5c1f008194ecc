"""What happened to a job, in words for people: the log, `ferrorpc status` and the status page tell it.

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


class Entry(NamedTuple):
    """One occurrence, and when it was, in lived nanoseconds."""

    number: int
    at: int
    note: Note


class Chronicle:
    """The last occurrences of one job.

    Args:
        job: its name.
        now: the present, in lived nanoseconds.
        tell: hands a note to the process, which logs and counts it.
    """

    def __init__(self, job: str, now: Callable[[], int], tell: Callable[[Note], None]) -> None:
        self._job = job
        self._now = now
        self._tell = tell
        self._entries: deque[Entry] = deque(maxlen=OCCURRENCES_MAX)
        self._count = 0

    def add(self, kind: str, text: str, *, rank: int = -1, generation: int = 0) -> None:
        """Something happened. `kind` is one of the words that session.proto lists."""
        self._count += 1
        note = Note(self._job, kind, text[:1024], rank, generation)
        self._entries.append(Entry(self._count, self._now(), note))
        self._tell(note)

    def told(self) -> list[session_pb2.Occurrence]:
        """All that is remembered, oldest first."""
        now = self._now()
        return [
            session_pb2.Occurrence(
                number=entry.number,
                kind=entry.note.kind,
                text=entry.note.text,
                rank=entry.note.rank,
                generation=entry.note.generation,
                age_ms=(now - entry.at) // MILLISECOND,
            )
            for entry in self._entries
        ]
