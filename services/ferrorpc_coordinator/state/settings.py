"""Settings and limits of a coordinator. Durations are in integer nanoseconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ferrorpc.config import NAME_BYTES_MAX
from ferrorpc.wire.limits import (
    BARRIER_BYTES_MAX,
    FRAME_BYTES_MAX,
    KEY_BYTES_MAX,
    KEYS_MAX,
    LEASE_SECONDS_MAX,
    PAYLOAD_BYTES_MAX,
    STORE_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITES_MAX,
)

MILLISECOND: Final = 1_000_000
SECOND: Final = 1_000 * MILLISECOND


def format_seconds(duration_ns: int) -> str:
    """A duration for a message, such as "2.0 s"."""
    return f"{duration_ns / 1e9:.1f} s"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one job, session or request. Exceeding one raises LimitExceededError with the field's name."""

    key_bytes: int = KEY_BYTES_MAX
    value_bytes: int = VALUE_BYTES_MAX
    frame_bytes: int = FRAME_BYTES_MAX
    """Any control frame except one that sets a value."""
    payload_bytes: int = PAYLOAD_BYTES_MAX
    """Payload of one member at a barrier."""
    barrier_bytes: int = BARRIER_BYTES_MAX
    """Payloads of all members at one barrier."""
    name_bytes: int = NAME_BYTES_MAX
    hello_bytes: int = 16 << 10
    """A Hello. The other members receive what it contains."""
    world_bytes: int = 1920 << 10
    """Names, addresses and labels of all members of a generation, which each gets in one frame."""
    jobs: int = 256
    members: int = 10_000
    """Living members of a job."""
    gone_members: int = 1_024
    """Dead and departed members of a job that are remembered."""
    keys: int = KEYS_MAX
    store_bytes: int = STORE_BYTES_MAX
    watches: int = 1_000
    requests: int = 1_024
    """Unanswered requests of one session."""
    waited_keys: int = 1_000_000
    """Keys for which the requests of a job wait; a key counts once for each request."""
    open_barriers: int = 4_096
    history_events: int = 4_096
    """Changes of the store that a new watch can be sent."""
    history_bytes: int = 4 << 20
    """Less than the unread bytes at which a session is closed, so that a new watch can be sent all of it at once."""
    page_bytes: int = 128 << 10
    """Keys in one answer."""
    generation_number: int = 1 << 40
    """Highest generation that a member may claim to have been part of, beyond what was given out; numbers on the wire have 64
    bits."""
    generations: int = 16
    """Ended generations in the status."""
    links: int = 64
    """Links kept per member."""
    status_links: int = 4_096
    """Links of all members together in one status, divided equally among them."""
    status_page_bytes: int = 512 << 10
    """Barriers and members in one page of the status; with the log and the generations it stays below 2 MiB."""
    remembered_writes: int = WRITES_MAX
    """Write results kept per client, for retries."""
    remembered_clients: int = 1_024
    """Clients of unary calls whose write results are kept."""
    remembered_results: int = 64
    """Answers kept per session, for repeated requests."""
    remembered_result_bytes: int = 64 << 10
    """Larger answers are not kept: the repeated request is carried out again, which is safe for every request."""
    remembered_barriers: int = 1_024
    """Outcomes of barriers kept for each set of participants: as many as one of them may have asked for at once."""
    remembered_barrier_bytes: int = 16 << 20
    """Memory of all outcomes that a job keeps."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Timeouts and other settings of a coordinator."""

    lease_ns: int = 3 * SECOND
    """A member without a frame for this long is stalled, or dead if its stream has ended. A Hello may ask for another lease."""
    lease_min_ns: int = SECOND // 5
    lease_max_ns: int = LEASE_SECONDS_MAX * SECOND
    grace_ns: int = 2 * SECOND
    """How long a member may take to resume after its stream ended."""
    stall_ns: int = 60 * SECOND
    """How long a member's stream may be open without a frame before the member is evicted."""
    survivor_wait_ns: int = 5 * SECOND
    """How long an elastic round waits at least for members of a broken generation that have not asked to join yet."""
    restart_grace_ns: int = 10 * SECOND
    """How long members have at least to resume after a restart of the coordinator, or after it was cut off."""
    outage_ns: int = 300 * SECOND
    """How long silent members are not taken for dead while nobody is heard of: as long as they wait for a coordinator."""
    heartbeat_ns: int = SECOND // 2
    """The heartbeat interval of members; at most a quarter of their lease."""
    tick_interval_ns: int = SECOND // 4
    """How often the coordinator asks to be called at least, to notice its own pauses."""
    pause_ns: int = SECOND // 2
    """A longer gap between two steps is a pause of the coordinator itself, and is removed from running time."""
    durable: bool = False
    """Whether there is a journal for `Persist` effects."""
    version: str = ""
    cost_table: str = ""
    """The cost table, as JSON, by which new generations choose algorithms; empty for the one shipped with ferrorpc."""
    limits: Limits = field(default_factory=Limits)

    @property
    def silence_ns(self) -> int:
        """After this time without a frame several beats are missing, of members with the usual lease."""
        return 3 * self.beat_ns(self.granted_lease_ns(0))

    def granted_lease_ns(self, asked_ns: int) -> int:
        """The lease of a member that asks for this one; 0 asks for the usual one."""
        return min(max(asked_ns or self.lease_ns, self.lease_min_ns), self.lease_max_ns)

    def missed_beat_ns(self, lease_ns: int) -> int:
        """Who has this lease, and sent no frame for this long, missed a beat. The connection to a host that vanished takes
        longer to end, with the usual heartbeat: 1.5 s after the first data that was not acknowledged."""
        return 2 * self.beat_ns(lease_ns)

    def beat_ns(self, lease_ns: int) -> int:
        """The heartbeat interval of a member with this lease."""
        return min(self.heartbeat_ns, lease_ns // 4)
