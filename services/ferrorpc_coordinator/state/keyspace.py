"""The values of a job's store, in memory and in the journal: no requests, no waiting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Final

from ferrorpc.errors import require
from ferrorpc.v1 import journal_pb2, store_pb2
from ferrorpc_coordinator.state.context import JobContext

TABLE: Final = "store"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a key holds, since which revision, and what it vanishes with."""

    value: bytes
    revision: int
    owner: str = ""
    """The client (name#incarnation) of a key that is bound to a session."""
    generation: int = 0
    """Of a key that is bound to a generation."""

    def row(self) -> journal_pb2.EntryRow:
        """What survives a restart."""
        binding = store_pb2.KEY_BINDING_JOB
        if self.owner:
            binding = store_pb2.KEY_BINDING_SESSION
        elif self.generation:
            binding = store_pb2.KEY_BINDING_GENERATION
        return journal_pb2.EntryRow(
            value=self.value, revision=self.revision, binding=binding, owner=self.owner, generation=self.generation
        )


class Keyspace:
    """Keys in order, with their entries and the bytes they take. Every change counts a revision and writes a row."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._entries: dict[str, Entry] = {}
        self._sorted: list[str] = []
        self._bound: dict[str | int, set[str]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """What the key holds."""
        return self._entries.get(key)

    def set(self, key: str, value: bytes, owner: str = "", generation: int = 0) -> Entry:
        """Sets a key; its binding is now this one.

        Raises:
            LimitExceededError: too many keys, or too many bytes; nothing has changed.
        """
        before = self._entries.get(key)
        grown = self.bytes + len(value) + (len(key) if before is None else -len(before.value))
        require(f"bytes in the store of job {self._context.job}", grown, "store_bytes", self._context.limits.store_bytes)
        require(f"keys of job {self._context.job}", len(self._entries) + (before is None), "keys", self._context.limits.keys)
        self.bytes = grown
        entry = Entry(value, self._context.durable_state.next_revision(), owner, generation)
        self._unbind(key, before)
        self._place(key, entry)
        if before is None:
            insort(self._sorted, key)
        self._context.put(TABLE, key, entry.row())
        return entry

    def delete(self, key: str) -> int:
        """Removes a key that exists; returns the revision of that change."""
        entry = self._entries.pop(key)
        self._unbind(key, entry)
        self.bytes -= len(key) + len(entry.value)
        del self._sorted[bisect_left(self._sorted, key)]
        self._context.remove(TABLE, key)
        return self._context.durable_state.next_revision()

    def bound_to(self, what: str | int) -> list[str]:
        """Keys that vanish with this client or generation, in order."""
        return sorted(self._bound.get(what, ()))

    def page(self, prefix: str, after: str, page_bytes: int) -> tuple[list[str], bool]:
        """Keys with this prefix that come after `after`, as many as fit; and whether there are more."""
        start = max(bisect_left(self._sorted, prefix), bisect_right(self._sorted, after))
        keys: list[str] = []
        size = 0
        for index in range(start, len(self._sorted)):
            key = self._sorted[index]
            if not key.startswith(prefix):
                break
            size += len(key) + 4
            if keys and size > page_bytes:
                return keys, True
            keys.append(key)
        return keys, False

    def recover(self, rows: dict[str, bytes]) -> None:
        """Takes back what was durable, out of `rows`: values twice would be more memory than is needed at any other time."""
        for key in list(rows):
            row = journal_pb2.EntryRow.FromString(rows.pop(key))
            self._place(key, Entry(row.value, row.revision, row.owner, row.generation))
            self.bytes += len(key) + len(row.value)
        self._sorted = sorted(self._entries)

    def bindings(self) -> list[str | int]:
        """Every client and generation that some key is bound to."""
        return list(self._bound)

    def _place(self, key: str, entry: Entry) -> None:
        self._entries[key] = entry
        what = entry.owner or entry.generation
        if what:
            self._bound.setdefault(what, set()).add(key)

    def _unbind(self, key: str, entry: Entry | None) -> None:
        what = (entry.owner or entry.generation) if entry is not None else 0
        if what:
            self._bound[what].discard(key)
            if not self._bound[what]:
                del self._bound[what]
