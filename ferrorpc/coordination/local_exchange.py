"""A named barrier, or an exchange of NCCL ids, of a job whose members share one process."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferrorpc.errors import FerroError, LimitExceededError, require
from ferrorpc.wire.limits import BARRIER_BYTES_MAX


@dataclass(slots=True)
class Exchange:
    """Its participants, what each has brought, and its outcome for all. The caller holds the world's lock around every use."""

    label: str
    ranks: tuple[int, ...]
    ids_needed: int = 0
    """An exchange of ids is complete with so many ids; a barrier (0) when all participants have arrived."""
    arrived: dict[int, list[bytes]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Ranks that have left the barrier, with or without its outcome. One that was interrupted may come again."""
    outcome: list[bytes] | FerroError | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not arrived."""
        return [rank for rank in self.ranks if rank not in self.arrived]

    def arrive(self, rank: int, brought: list[bytes]) -> None:
        """A rank arrives, or arrives again. What it brings may be too much of all ranks together: then all get the error."""
        self.arrived[rank] = brought
        parts = [part for rank in self.ranks for part in self.arrived.get(rank, ())]
        complete = len(parts) >= self.ids_needed if self.ids_needed else not self.missing
        if self.outcome is not None:
            return
        try:
            require(f"payloads of {self.label}", sum(map(len, parts)), "barrier_bytes", BARRIER_BYTES_MAX)
            self.outcome = parts if complete else None
        except LimitExceededError as error:
            self.outcome = error
