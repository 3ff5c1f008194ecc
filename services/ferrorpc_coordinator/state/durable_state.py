"""What is durable: the cluster's identity, the revision that counts changes, and the rows to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ferrorpc_coordinator.state.effects import Persist, Row

META: Final = "meta"


class DurableState:
    """Counts changes and collects their rows until the step ends.

    `rows` holds what was recovered, by table and key, for each part of the state to take its own from.
    """

    def __init__(self, recovered: Iterable[Row], mint: Callable[[], str]) -> None:
        self.rows: dict[str, dict[str, bytes]] = {}
        for table, key, value in recovered:
            self.rows.setdefault(table, {})[key] = value
        meta = self.rows.get(META, {})
        self.recovered = "cluster_id" in meta
        if self.rows and not self.recovered:
            raise ValueError("there are rows, but none that names their cluster")
        self.cluster_id = meta["cluster_id"].decode() if self.recovered else mint()
        self.epoch = int(meta.get("epoch", b"0")) + 1
        self.revision = int(meta.get("revision", b"0"))
        self._written: dict[tuple[str, str], bytes | None] = {
            (META, "cluster_id"): self.cluster_id.encode(),
            (META, "epoch"): str(self.epoch).encode(),
        }
        self._noted = self.revision

    def next_revision(self) -> int:
        """Counts one more change of state; returns its revision."""
        self.revision += 1
        return self.revision

    def put(self, table: str, key: str, value: bytes) -> None:
        """Writes a row with this step."""
        self._written[table, key] = value

    def remove(self, table: str, key: str) -> None:
        """Removes a row with this step."""
        self._written[table, key] = None

    def flush(self) -> list[Persist]:
        """The rows of this step; the revision is among them when it grew."""
        if self._noted != self.revision:
            self.put(META, "revision", str(self.revision).encode())
            self._noted = self.revision
        written, self._written = self._written, {}
        return [Persist(table, key, value) for (table, key), value in written.items()]
