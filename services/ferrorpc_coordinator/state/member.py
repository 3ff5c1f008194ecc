"""A member: one process in one job, from its first Hello to its end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final

from ferrorpc.v1 import identity_pb2, journal_pb2, session_pb2
from ferrorpc_coordinator.state.effects import Answer
from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND

WATCHED_NS: Final = SECOND
"""Whether a member waits is told from periods of at least this length, so that a late beat changes nothing."""


@unique
class Liveness(Enum):
    """Whether a member is alive."""

    PRESENT = "present"
    """Its stream is open and a frame came within its lease."""
    STALLED = "stalled"
    """Its stream is open but no frame came for a lease, as when a process holds the GIL."""
    SUSPECT = "suspect"
    """Its stream ended without a Leave; it may resume."""
    DEAD = "dead"
    LEFT = "left"


_GONE: Final = (Liveness.DEAD, Liveness.LEFT)  # here, because a status asks for each member: an enum's names are slow to find


@dataclass(slots=True, eq=False)
class Member:
    """What the coordinator knows of one process. Times are in nanoseconds of running time.

    Invariants: `stream` is not None exactly while PRESENT or STALLED; with a rank, `generation` is the job's newest; DEAD
    and LEFT are final.
    """

    name: str
    incarnation: int
    instance_id: str
    token_hash: bytes
    lease_ns: int
    host: str = ""
    address: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    liveness: Liveness = Liveness.PRESENT
    reason: str = ""
    stream: int | None = None
    last_heard: int = 0
    """When its last frame was received."""
    recovered: bool = False
    """No frame was received since the coordinator restarted."""
    fell_silent: bool = False
    """A beat was missing before its last stream ended."""
    spared: bool = False
    """It would be dead, but nobody else is heard of either, so the coordinator may be cut off."""
    rank: int = -1
    """Its rank in the newest generation; -1 if it has none there."""
    generation: int = 0
    pinned: bool = False
    last_rank: int = -1
    successor_of: str = ""
    """What the launcher chose for the process whose name it took; that one's exit may be reported late."""
    step: int = 0
    """Operations begun in its last generation; the next ones are of that, too."""
    step_since: int = 0
    """When its step counter last changed."""
    activity: str = ""
    operation_ms: int = 0
    """Total time that its main thread has spent in operations, including one in progress."""
    waits: bool | None = None
    """Whether it was in operations for most of the last watched period. None before one has ended since its step changed."""
    waits_changed: int = 0
    """Since when that is so."""
    watched_at: int = 0
    """When the watched period began: at the last change of its step counter, or the end of the period before."""
    watched_operation_ms: int = 0
    """Its `operation_ms` at that time."""
    training: identity_pb2.Training | None = None
    """Where the time of its training steps went."""
    links: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Peer's world rank -> (kind of link, bytes sent to it)."""
    open_requests: set[int] = field(default_factory=set)
    answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)
    """By the numbers of its requests, for repeated ones."""
    answer_bytes: int = 0
    revision: int = 0
    """That of its journal row: for one that has gone, the revision at which it went."""

    @property
    def exit_report_ids(self) -> tuple[str, str, str]:
        """The instance ids in an exit report that match this process: empty, the part its launcher chose, and the full id."""
        return "", self.launch, self.instance_id

    @property
    def launch(self) -> str:
        """The part of its instance id that its launcher chose."""
        return self.instance_id.partition(".")[0]

    @property
    def run(self) -> str:
        """The launcher's run whose workers are the whole world; empty for a world that is not of one run."""
        return self.labels.get("run", "")

    @property
    def data_protocol(self) -> str:
        """The version of what it sends to other ranks; empty for one that does not say."""
        return self.labels.get("data_protocol", "")

    def understands(self, other: Member) -> bool:
        """Whether they can be ranks of one generation: they do not say that what they send to other ranks differs."""
        own, theirs = self.data_protocol, other.data_protocol
        return own == theirs or "" in (own, theirs)

    @property
    def alive(self) -> bool:
        """Neither dead nor departed; perhaps suspect."""
        return self.liveness not in _GONE

    @property
    def connected(self) -> bool:
        """Has an open stream."""
        return self.stream is not None

    @property
    def waits_since(self) -> int | None:
        """Since when it has waited in operations; None if it is not seen to."""
        return self.waits_changed if self.waits and self.liveness is Liveness.PRESENT else None

    @property
    def idle_since(self) -> int | None:
        """Since when it has neither waited nor begun an operation; None if it is not seen not to: beats may be rare."""
        if self.waits is False:
            return self.waits_changed
        return None if self.liveness is Liveness.PRESENT else self.last_heard

    @property
    def client(self) -> str:
        """The name under which its write results are kept."""
        return f"{self.name}#{self.incarnation}"

    @property
    def display_name(self) -> str:
        """The member in text: with its rank if it has one."""
        return f"rank {self.rank} ({self})" if self.rank >= 0 else str(self)

    def __str__(self) -> str:
        return f"{self.name} on {self.host}" if self.host else self.name

    def beat(self, beat: session_pb2.Beat, now: int, most_links: int) -> None:
        """Updates the member from a heartbeat of its generation: one from before it counts nothing. At most `most_links` links
        are kept."""
        if beat.generation != self.generation:
            return
        self.activity = beat.activity[:256]
        self.operation_ms = beat.operation_ms
        if beat.step != self.step:
            self.step = beat.step
            self._begin_step(now)
        elif now - self.watched_at >= WATCHED_NS:
            waited_ns = (self.operation_ms - self.watched_operation_ms) * MILLISECOND
            waits = 2 * waited_ns > now - self.watched_at
            if waits is not self.waits:
                self.waits, self.waits_changed = waits, self.watched_at
            self.watched_at, self.watched_operation_ms = now, self.operation_ms
        if beat.HasField("training"):
            spent = beat.training  # not kept itself: it may have fields of a later version, of any size
            self.training = identity_pb2.Training(
                steps=spent.steps, compute_ms=spent.compute_ms, exposed_ms=spent.exposed_ms, hidden_ms=spent.hidden_ms
            )
        for link in beat.links:
            if link.peer_rank in self.links or len(self.links) < most_links:
                self.links[link.peer_rank] = link.kind[:16], link.sent_bytes

    def _begin_step(self, now: int) -> None:
        self.step_since = self.watched_at = now
        self.waits, self.watched_operation_ms = None, self.operation_ms

    def busiest_links(self, most: int) -> list[identity_pb2.Link]:
        """Its links, those with the most bytes first."""
        chosen = sorted(self.links.items(), key=lambda item: (-item[1][1], item[0]))[:most]
        return [identity_pb2.Link(peer_rank=peer, kind=kind, sent_bytes=sent) for peer, (kind, sent) in chosen]

    def assign_rank(self, rank: int, generation: int, now: int) -> None:
        """Gives it a rank in a generation, in which it has done nothing yet."""
        self.rank = self.last_rank = rank
        self.generation = generation
        self.step, self.operation_ms, self.training = 0, 0, None
        self._begin_step(now)
        self.links.clear()

    def lose_rank(self) -> None:
        """It has none in the newest generation. What it did in its last one stays known, for error messages."""
        self.rank, self.generation = -1, 0
        self.links.clear()

    def row(self) -> journal_pb2.MemberRow:
        """The journal row, which survives a restart of the coordinator."""
        row = journal_pb2.MemberRow(
            incarnation=self.incarnation,
            instance_id=self.instance_id,
            token_hash=self.token_hash,
            reason=self.reason,
            lease_ms=self.lease_ns // 1_000_000,
            host=self.host,
            address=self.address,
            revision=self.revision,
        )
        if self.liveness is Liveness.DEAD:
            row.state = identity_pb2.MEMBER_STATE_DEAD
        elif self.liveness is Liveness.LEFT:
            row.state = identity_pb2.MEMBER_STATE_LEFT
        for name, value in self.labels.items():
            row.labels.add(name=name, value=value)
        return row

    @classmethod
    def from_row(cls, name: str, data: bytes) -> Member:
        """The member from its journal row: suspect until it resumes, unless it was dead or gone."""
        row = journal_pb2.MemberRow.FromString(data)
        gone = {identity_pb2.MEMBER_STATE_DEAD: Liveness.DEAD, identity_pb2.MEMBER_STATE_LEFT: Liveness.LEFT}
        return cls(
            name=name,
            incarnation=row.incarnation,
            instance_id=row.instance_id,
            token_hash=row.token_hash,
            lease_ns=row.lease_ms * 1_000_000,
            host=row.host,
            address=row.address,
            labels={label.name: label.value for label in row.labels},
            liveness=gone.get(row.state, Liveness.SUSPECT),
            reason=row.reason,
            revision=row.revision,
            recovered=True,
        )
