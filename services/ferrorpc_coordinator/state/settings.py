"""Everything that can be set on a coordinator's decisions. Durations are integer nanoseconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MILLISECOND: Final = 1_000_000
SECOND: Final = 1_000 * MILLISECOND
PROTOCOL_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one job, session or request may hold. Past one: LimitExceededError naming the field."""

    key_bytes: int = 512
    value_bytes: int = 1 << 20
    frame_bytes: int = 256 << 10
    """Any control frame but one that sets a value."""
    payload_bytes: int = 4 << 10
    """What one member brings to a barrier."""
    barrier_bytes: int = 1 << 20
    """What all members together bring to one barrier, so that its answer fits into a frame."""
    name_bytes: int = 128
    hello_bytes: int = 16 << 10
    """All that a member says of itself: it is told to every other."""
    world_bytes: int = 1920 << 10
    """What the members of a generation say of themselves together, so that each can be told of all in one frame."""
    jobs: int = 256
    members: int = 10_000
    """Members of a job that live; as many names of gone ones are remembered as `gone_members` says."""
    gone_members: int = 1_024
    keys: int = 100_000
    store_bytes: int = 256 << 20
    watches: int = 1_000
    requests: int = 1_024
    """Unanswered requests of one session."""
    open_barriers: int = 4_096
    history_events: int = 4_096
    """Changes of the store that a watch can look back on."""
    history_bytes: int = 4 << 20
    """Less than a session may leave unread, so that a watch can be told all of it at once."""
    page_bytes: int = 128 << 10
    """One page of keys."""
    generation_number: int = 1 << 40
    """A member that claims to have lived through more generations is mistaken; numbers on the wire have 64 bits."""
    generations: int = 16
    """Ended generations that status can tell of."""
    links: int = 64
    """Peers of one member of whose links status can tell."""
    status_links: int = 4_096
    """Links of all members together that status tells of, in equal parts."""
    remembered_writes: int = 128
    """Request ids of one client whose results are kept for a retry."""
    remembered_clients: int = 1_024
    """Clients of unary calls whose request ids are kept."""
    remembered_results: int = 64
    """Answers of one session that are kept for a repeated request."""
    remembered_result_bytes: int = 64 << 10
    """An answer larger than this is not kept: a repeated request is carried out again, which is safe for every request."""
    remembered_barriers: int = 1_024
    remembered_barrier_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """How patient a coordinator is, and what it asks of its members."""

    lease_ns: int = 3 * SECOND
    """Without a frame for so long, a member is stalled; or dead, if its stream has ended. A Hello may ask for another."""
    lease_min_ns: int = SECOND // 5
    lease_max_ns: int = 300 * SECOND
    grace_ns: int = 2 * SECOND
    """How long a member whose stream ended may take to resume."""
    stall_ns: int = 60 * SECOND
    """How long a member may keep its stream open without a sign of life before it is evicted."""
    survivor_wait_ns: int = 5 * SECOND
    """How long an elastic round waits at least for members of a broken generation that have not asked for another yet."""
    restart_grace_ns: int = 10 * SECOND
    """After a restart, how long members that were not heard of yet are given at least."""
    heartbeat_ns: int = SECOND // 2
    """What members are told to beat at; never more than a quarter of their lease."""
    tick_interval_ns: int = SECOND // 4
    """How often the coordinator wants to be called at least, to notice its own pauses."""
    pause_ns: int = SECOND // 2
    """A longer gap between two steps was a pause of the coordinator itself; its length is taken out of every deadline."""
    durable: bool = False
    """Whether a journal keeps what `Persist` says."""
    version: str = ""
    cost_table: str = ""
    """What the generations that begin from now on choose algorithms by, as JSON; empty for what comes with ferrorpc."""
    limits: Limits = field(default_factory=Limits)
