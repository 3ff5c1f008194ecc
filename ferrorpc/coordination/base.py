"""What a rank needs of its coordinator, whether that is a remote service (session.py) or shared state (local.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ferrorpc.coordination.activity import Activity
from ferrorpc.errors import FerroError, UsageError
from ferrorpc.guard import Clock, Latch
from ferrorpc.types import Assignment


@dataclass(frozen=True, slots=True)
class Membership:
    """One generation as this rank lives it: what it was assigned, and the latch that trips when it is over."""

    assignment: Assignment
    latch: Latch = field(default_factory=Latch)


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What is known of one rank, for the sentence in an error."""

    rank: int
    name: str
    host: str = ""
    state: str = "unknown"
    step: int = 0
    beat_age_seconds: float = 0.0
    activity: str = ""
    reason: str = ""

    @property
    def standing(self) -> str:
        """Who it is and how it is; nothing that grows old, such as when it was last heard of."""
        where = f"{self.name} on {self.host}" if self.host else self.name
        why = f" ({self.reason})" if self.reason else ""
        who = f"rank {self.rank} ({where})" if self.rank >= 0 else where
        return f"{who}: {self.state}{why}"

    def __str__(self) -> str:
        doing = f", last seen in {self.activity}" if self.activity else ""
        return f"{self.standing}, last beat {self.beat_age_seconds:.1f} s ago, step {self.step}{doing}"


class Store(ABC):
    """Small values shared by the job; they outlive generations. Keys are text of at most 512 bytes, values bytes up to 1 MiB.

    Every method raises LimitExceededError past a limit, CoordinatorUnavailableError when the coordinator stays away, and
    leaves the store unchanged when it raises.
    """

    def __getstate__(self) -> NoReturn:
        """Refuses: it speaks through this process's session."""
        raise UsageError("a store cannot be copied or pickled", hint="pass its keys and values on; each rank has group.store")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: small values shared by the job>"

    @abstractmethod
    def set(self, key: str, value: bytes, *, bind: str = "job") -> None:
        """Sets a key. `bind`: "job", or "session" / "generation" for a key that vanishes with it."""

    @abstractmethod
    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value, as soon as the key exists. Raises StoreTimeoutError after `timeout` seconds (None: the job's; 0: now)."""

    @abstractmethod
    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a decimal counter (absent counts as 0) and returns the sum. Exactly once, retries included."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Sets the key if it holds `expected` (None: if it is absent). Returns whether it was set."""

    @abstractmethod
    def wait(self, keys: str | Iterable[str], timeout: float | None = None) -> None:
        """Returns when every key (of several, or a single one) exists; StoreTimeoutError names those that do not."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Removes a key. Returns whether it existed."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """All keys with this prefix, sorted."""


class Session(ABC):
    """This process's seat in a job. It outlives generations; groups come and go on it."""

    def __getstate__(self) -> NoReturn:
        """Refuses: it is this process's."""
        raise UsageError(
            "a session cannot be copied or pickled", hint="another process makes its own with init_process_group()"
        )

    def __repr__(self) -> str:
        seat = self.membership.assignment
        return f"<{type(self).__name__} rank {seat.rank} of {seat.size}, generation {seat.generation}>"

    clock: Clock
    store: Store
    membership: Membership
    """The current generation."""
    activity: Activity
    """What this rank does, for those who ask: told of every operation."""

    @abstractmethod
    def report(self, failure: FerroError, latch: Latch | None = None) -> None:
        """Ends the generation with this failure, unless it has ended already. Returns at once.

        Args:
            latch: of the generation that is meant; None for the current one. Where another has followed it, it is over on every
                rank, and only the latch trips.

        The first cause that the coordinator keeps comes back through `membership.latch`, on this rank as on every other. If
        the coordinator does not answer within a second, the latch trips with `failure` itself.
        """

    @abstractmethod
    def report_link_lost(self, peer: int, reason: str, latch: Latch | None = None) -> None:
        """The data stream to or from world rank `peer` broke without a goodbye. The verdict comes through the latch.

        Args:
            latch: as for `report`; a generation that is over needs no stream.
        """

    @abstractmethod
    def barrier(
        self, name: str, payload: bytes = b"", *, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[bytes]:
        """A named barrier of this generation; returns every participant's payload (at most 4 KiB each) in rank order.

        Raises:
            BarrierTimeoutError: with every missing rank and what is known of it. Breaks nothing.
            PeerLostError: a participant died.
        """

    @abstractmethod
    def describe(self, ranks: Iterable[int], timeout: float) -> list[MemberReport]:
        """What is known of these ranks; [] when nobody answers in time. Never raises: it serves error messages."""

    @abstractmethod
    def exchange_nccl_id(
        self,
        communicator: str,
        attempt: int,
        ranks: Sequence[int],
        unique_ids: Sequence[bytes] | FerroError | None,
        timeout: float,
    ) -> list[bytes]:
        """Relays NCCL ids within this generation: leaders pass the ids they minted (or the error that stopped them), the
        others None; all get the ids."""

    @property
    @abstractmethod
    def pending_members(self) -> list[str]:
        """Names of those whom the next generation would admit; spares, for whom it has no room, are not among them."""

    @abstractmethod
    def rejoin(self, timeout: float) -> Membership:
        """Takes part in the next generation (`reform`); it becomes `membership`.

        Raises:
            RendezvousTimeoutError: naming who is missing.
        """

    @abstractmethod
    def leave(self, reason: str = "") -> None:
        """Says goodbye: a clean end, or (with a reason such as "ValueError: ...") the others' cause. Idempotent, < 1 s."""
