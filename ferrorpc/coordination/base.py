"""A rank's interface to its coordinator, which is a remote service (session.py) or shared state in one process (local.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from ferrorpc.coordination import limits
from ferrorpc.coordination.activity import Activity
from ferrorpc.coordination.ordinals import Ordinals
from ferrorpc.errors import FerroError, UsageError
from ferrorpc.guard import Clock, Latch
from ferrorpc.types import Assignment

DESCRIBE_SECONDS: Final = 0.5
"""How long a failing operation waits for what the coordinator knows of the ranks it waited for."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One generation on this rank: its assignment, the latch that trips when it is over, the numbers of its barriers, and what
    this rank has done in it, for status and error messages. Operations that end late count in the generation they began in.

    `latch.end(failure)` ends it on every rank. The coordinator keeps the first cause, which trips the latch here and on all
    others; if it does not answer within a second, the latch trips with `failure` itself. If a later generation has begun, this
    one is over on every rank, and only the latch trips.
    """

    assignment: Assignment
    latch: Latch = field(default_factory=Latch)
    ordinals: Ordinals = field(default_factory=Ordinals)
    activity: Activity = field(default_factory=Activity)


def before_joining(job: str) -> Membership:
    """What a session has until its first generation: number 0, without ranks."""
    return Membership(Assignment(job, "", 0, -1, ()))


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What is known of one rank, for error messages."""

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
        """Its identity and state, without what changes all the time, such as the age of its last beat."""
        where = f"{self.name} on {self.host}" if self.host else self.name
        why = f" ({self.reason})" if self.reason else ""
        who = f"rank {self.rank} ({where})" if self.rank >= 0 else where
        return f"{who}: {self.state}{why}"

    def __str__(self) -> str:
        doing = f", last seen in {self.activity}" if self.activity else ""
        return f"{self.standing}, last beat {self.beat_age_seconds:.1f} s ago, step {self.step}{doing}"


class Store(ABC):
    """Small values that the job shares. They outlive generations. Keys are up to 512 characters of printable ASCII
    without blanks, values bytes up to 1 MiB.

    Every method raises LimitExceededError past a limit, and CoordinatorUnavailableError if the coordinator stays unreachable. A
    refusal, such as LimitExceededError or UsageError, leaves the store unchanged. A write that ends with StoreTimeoutError or
    CoordinatorUnavailableError has had no answer: it may have been carried out, or still be. From a restart in which the
    coordinator lost the store until this process is in the next generation they raise StaleGenerationError.

    A timeout counts while the coordinator can be reached. An outage is waited for besides, at most FERRORPC_MAX_OUTAGE, even
    with a timeout of 0.
    """

    def __getstate__(self) -> NoReturn:
        """Refuses: a store works through this process's session only."""
        raise UsageError("a store cannot be copied or pickled", hint="pass its keys and values on; each rank has group.store")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: small values shared by the job>"

    @abstractmethod
    def set(self, key: str, value: bytes, *, bind: str = "job") -> None:
        """Sets a key. `bind`: "job", or "session" / "generation" for a key that is deleted when that ends."""

    @abstractmethod
    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value, as soon as the key exists. Raises StoreTimeoutError after `timeout` seconds (None: the job's; 0: now)."""

    @abstractmethod
    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a decimal counter (absent counts as 0) and returns the sum. Exactly once, retries included. A bound key stays
        bound."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | None, value: bytes, *, bind: str = "job") -> bool:
        """Sets the key if it holds `expected` (None: if it is absent). Returns whether it was set. `bind`: as in `set`, but a
        bound key stays bound with "job"."""

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
    """This process's membership in a job. It outlives generations and their groups."""

    def __getstate__(self) -> NoReturn:
        """Refuses: a session belongs to its process."""
        raise UsageError(
            "a session cannot be copied or pickled", hint="another process makes its own with init_process_group()"
        )

    def __repr__(self) -> str:
        own = self.membership.assignment
        return f"<{type(self).__name__} rank {own.rank} of {own.size}, generation {own.generation}>"

    clock: Clock
    store: Store
    membership: Membership
    """The current generation; that of `before_joining` until there is one."""

    @property
    def activity(self) -> Activity:
        """That of the current generation."""
        return self.membership.activity

    def _participants(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        """The participants of an exchange in this generation; None: all its ranks."""
        own = self.membership.assignment
        return limits.check_participants(ranks, own.rank, own.size)

    @abstractmethod
    def report_link_lost(self, peer: int, reason: str, latch: Latch | None = None) -> None:
        """Reports that the data stream to or from world rank `peer` broke. The coordinator decides what trips the latch.

        Args:
            reason: why, in words; `generation_errors.PEER_LEFT` where the peer has said goodbye and is still needed.
            latch: of the generation in which it broke; None for the current one. Of one that is over nothing is reported.
        """

    @abstractmethod
    def barrier(
        self, name: str, payload: bytes = b"", *, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[bytes]:
        """A named barrier of this generation; returns every participant's payload (at most 4 KiB each) in rank order.

        The n-th use of a name on one rank meets the n-th use on the others, also where it has timed out: who comes later gets
        that timeout at once, and the next use is a new barrier for all. So give all ranks the same timeout. Known are the last
        1,024 outcomes of each set of participants, and at most 16 MiB of them in a job, until the coordinator restarts; who
        comes after that gets a timeout of its own.

        A use that is interrupted, as by Ctrl-C, is not over: the next call with its name goes on with it, and with a payload of
        its own, unless all have come meanwhile.

        Of each set of participants the last 8,192 names are known; one that was used before them is taken for a new one. So who
        uses that many must use them in the same order.

        Raises:
            BarrierTimeoutError: with every missing rank and what is known of it. The generation goes on.
            PeerLostError: a participant died.
            GroupAbortedError: a participant called `reform` instead.
            LimitExceededError: some participant has a payload, and the disk of the coordinator's journal is full. All get this,
                and the generation goes on.
        """

    @abstractmethod
    def describe(self, ranks: Iterable[int], timeout: float) -> list[MemberReport]:
        """What is known of these ranks; [] if the coordinator does not answer in time. Never raises: error messages use it."""

    def described(self, ranks: Iterable[int]) -> str:
        """As `describe`, as text for the error of an operation that waited for these ranks. Where this rank has lost the
        coordinator, that is said as well: then its own network may be at fault, not those ranks."""
        return "; ".join(map(str, self.describe(ranks, DESCRIBE_SECONDS)))

    @abstractmethod
    def exchange_nccl_id(
        self,
        communicator: str,
        attempt: int,
        ranks: Sequence[int],
        unique_ids: Sequence[bytes] | FerroError | None,
        timeout: float,
    ) -> list[bytes]:
        """Relays NCCL ids within this generation. Leaders pass the ids they created, or the error that kept them from it; the
        other ranks pass None. Every rank gets all ids."""

    @property
    @abstractmethod
    def pending_members(self) -> list[str]:
        """Names of the members that the next generation would admit. Spares, for whom it has no room, are not among them."""

    @abstractmethod
    def rejoin(self, timeout: float) -> Membership:
        """Joins the next generation (`reform`), which becomes `membership`.

        Raises:
            RendezvousTimeoutError: naming who is missing.
        """

    @abstractmethod
    def leave(self, reason: str = "") -> None:
        """Leaves the job. A reason, such as "ValueError: ...", ends the generation for the others. Idempotent. Takes under
        1 s, or up to 10 s where the coordinator can be reached but does not answer."""
