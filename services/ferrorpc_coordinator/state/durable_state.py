"""The durable part of the state: cluster id, epoch, revision, removed generations, and the journal rows that a step writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ferrorpc_coordinator.state.effects import Persist, Row

META: Final = "meta"


class DurableState:
    """Counts changes of state and collects their rows until the step ends.

    `rows` holds what was recovered from the journal, by table and key. Each part of the state takes its own rows out of it.
    """

    def __init__(self, recovered: Iterable[Row], mint: Callable[[], str]) -> None:
        self.rows: dict[str, dict[str, bytes]] = {}
        for table, key, value in recovered:
            self.rows.setdefault(table, {})[key] = value
        meta = self.rows.get(META, {})
        is_known = "cluster_id" in meta
        if self.rows and not is_known:
            raise ValueError("there are rows, but none that names their cluster")
        self.cluster_id = meta["cluster_id"].decode() if is_known else mint()
        self.epoch = int(meta.get("epoch", b"0")) + 1
        self.revision = int(meta.get("revision", b"0"))
        self.removed_generation = int(meta.get("removed_generation", b"0"))
        """The highest generation of all jobs that were removed. Other jobs begin after it: they may have the name of one."""
        self._written: dict[tuple[str, str], bytes | None] = {
            (META, "cluster_id"): self.cluster_id.encode(),
            (META, "epoch"): str(self.epoch).encode(),
        }

    def next_revision(self) -> int:
        """Counts one more change of state; returns its revision."""
        self.revision += 1
        self.put(META, "revision", str(self.revision).encode())
        return self.revision

    def remove_generations(self, newest: int) -> None:
        """A job is removed with this step; `newest` was its newest generation."""
        if newest > self.removed_generation:
            self.removed_generation = newest
            self.put(META, "removed_generation", str(newest).encode())

    def put(self, table: str, key: str, value: bytes) -> None:
        """Writes a row with this step."""
        self._written[table, key] = value

    def remove(self, table: str, key: str) -> None:
        """Removes a row with this step."""
        self._written[table, key] = None

    def flush(self) -> list[Persist]:
        """Returns the rows of this step; they include the revision if it changed."""
        written, self._written = self._written, {}
        return [Persist(table, key, value) for (table, key), value in written.items()]
