"""The keys and values of a job's store, in memory and in the journal, without requests and waiting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Final

from ferrorpc.errors import require
from ferrorpc.v1 import journal_pb2
from ferrorpc_coordinator.state.context import JobContext

TABLE: Final = "store"


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key, the revision of its last change, and what it is bound to."""

    value: bytes
    revision: int
    bound_to: str | int = 0
    """The client (name#incarnation) to whose session the key is bound, or the generation; 0 for the job."""

    def row(self) -> journal_pb2.EntryRow:
        """The journal row."""
        owner, generation = (self.bound_to, 0) if isinstance(self.bound_to, str) else ("", self.bound_to)
        return journal_pb2.EntryRow(value=self.value, revision=self.revision, owner=owner, generation=generation)


class Keyspace:
    """The sorted keys, with their entries and total size. Every change takes a revision and writes a row."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._entries: dict[str, Entry] = {}
        self._sorted: list[str] = []
        self._bound: dict[str | int, set[str]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """The entry of a key."""
        return self._entries.get(key)

    def set(self, key: str, value: bytes, bound_to: str | int) -> Entry:
        """Sets a key and its binding.

        Raises:
            LimitExceededError: too many keys or too many bytes; nothing has changed.
        """
        before = self._entries.get(key)
        grown = self.bytes + len(value) + (len(key) if before is None else -len(before.value))
        require(f"bytes in the store of job {self._context.job}", grown, "store_bytes", self._context.limits.store_bytes)
        require(f"keys of job {self._context.job}", len(self._entries) + (before is None), "keys", self._context.limits.keys)
        self.bytes = grown
        entry = Entry(value, self._context.durable_state.next_revision(), bound_to)
        self._unbind(key, before)
        self._place(key, entry)
        if before is None:
            insort(self._sorted, key)
        self._context.put(TABLE, key, entry.row())
        return entry

    def delete(self, key: str) -> int:
        """Deletes an existing key; returns the revision of the change."""
        entry = self._entries.pop(key)
        self._unbind(key, entry)
        self.bytes -= len(key) + len(entry.value)
        del self._sorted[bisect_left(self._sorted, key)]
        self._context.remove(TABLE, key)
        return self._context.durable_state.next_revision()

    def bound_to(self, what: str | int) -> list[str]:
        """The keys bound to this client or generation, sorted."""
        return sorted(self._bound.get(what, ()))

    def page(self, prefix: str, after: str, page_bytes: int) -> tuple[list[str], bool]:
        """The keys with this prefix that come after `after`, as many as fit into `page_bytes`; and whether there are more."""
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
        """Restores the keys from the journal. Takes the rows out of `rows`, so that values are not in memory twice."""
        for key in list(rows):
            row = journal_pb2.EntryRow.FromString(rows.pop(key))
            self._place(key, Entry(row.value, row.revision, row.owner or row.generation))
            self.bytes += len(key) + len(row.value)
        self._sorted = sorted(self._entries)

    def bindings(self) -> list[str | int]:
        """All clients and generations to which keys are bound."""
        return list(self._bound)

    def _place(self, key: str, entry: Entry) -> None:
        self._entries[key] = entry
        if entry.bound_to:
            self._bound.setdefault(entry.bound_to, set()).add(key)

    def _unbind(self, key: str, entry: Entry | None) -> None:
        if entry is not None and entry.bound_to:
            keys = self._bound[entry.bound_to]
            keys.discard(key)
            if not keys:
                del self._bound[entry.bound_to]
