"""A named barrier, or an exchange of NCCL ids, of a job whose members share one process."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferrorpc.errors import FerroError, require
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
        """A rank arrives, or arrives again.

        Raises:
            LimitExceededError: it brings more than a barrier takes of all ranks together.
        """
        arrived = self.arrived | {rank: brought}
        parts = [part for rank in self.ranks for part in arrived.get(rank, ())]
        require(f"payloads of {self.label}", sum(map(len, parts)), "barrier_bytes", BARRIER_BYTES_MAX)
        self.arrived = arrived
        complete = len(parts) >= self.ids_needed if self.ids_needed else not self.missing
        if complete and self.outcome is None:
            self.outcome = parts
