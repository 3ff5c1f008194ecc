"""Limits: they fit together, defaults are the same on both sides, and the document tells them."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.health import WATCHES_MAX
from ferrorpc_coordinator.send_queue import SEND_QUEUE_BYTES_MAX
from ferrorpc_coordinator.state.nccl_ids import COMMUNICATORS_MAX
from ferrorpc_coordinator.state.settings import SECOND, Limits, Settings
from ferrorpc_coordinator.unread import ANSWERS_BYTES_MAX, UNREAD_BYTES_MAX
from ferrorpc_coordinator.web.event_streams import VIEWERS_MAX
from ferrorpc_coordinator.write_budget import LARGE_FRAME_BYTES, TURN_SECONDS, WRITING_BYTES_MAX

from ferrorpc.collectives.arena.control_blocks import DIRECTORY_ENTRIES
from ferrorpc.config import SETTINGS
from ferrorpc.transports.control import CONTROL_MAX
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc.server import STREAMS_MAX
from ferrorpc.wire import frames, options
from ferrorpc.wire.limits import WRITES_MAX
from tests.house.tree import ROOT

LIMITS = Limits()
DEFAULTS = {setting.name: setting.default for setting in SETTINGS}


def size(count: int) -> str:
    """Bytes as docs/operations.md writes them."""
    for unit, bits in (("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits and count % (1 << bits) == 0:
            return f"{count >> bits} {unit}"
    return f"{count} bytes"


ROWS = (
    ("a key of the store", f"{size(LIMITS.key_bytes)} of printable ASCII without blanks"),
    ("a value of the store", size(LIMITS.value_bytes)),
    ("keys of a job; their bytes together", f"{LIMITS.keys:,}; {size(LIMITS.store_bytes)}"),
    ("any other control frame", size(LIMITS.frame_bytes)),
    ("one member's payload at a named barrier; all together", f"{size(LIMITS.payload_bytes)}; {size(LIMITS.barrier_bytes)}"),
    ("a member's name; all it says of itself", f"{size(LIMITS.name_bytes)}; {size(LIMITS.hello_bytes)}"),
    ("what the members of a generation say of themselves together", size(LIMITS.world_bytes)),
    ("members of a job; jobs of a coordinator", f"{LIMITS.members:,}; {LIMITS.jobs}"),
    ("members that have gone, whose names and last ranks a job still knows", f"{LIMITS.gone_members:,}"),
    ("unanswered requests of a session", f"{LIMITS.requests:,}"),
    ("unanswered writes of a session to the store", f"{WRITES_MAX}; others wait for their turn until their timeout"),
    ("replies that a peer leaves unread (`CONTROL_MAX`)", f"{CONTROL_MAX:,}"),
    ("bytes that a session leaves unread", f"{size(SEND_QUEUE_BYTES_MAX)}; then its stream is closed, and it resumes"),
    (
        f"bytes of frames beyond {size(LARGE_FRAME_BYTES)} that all sessions are given at once",
        f"{size(WRITING_BYTES_MAX)}; others wait, and jobs take turns, of {TURN_SECONDS:g} s at most where nobody reads",
    ),
    (
        "bytes that the clients of a job leave unread of answers to calls; on streams that have ended",
        f"{size(UNREAD_BYTES_MAX)}; {size(UNREAD_BYTES_MAX)}. Then further calls are refused whose answers may be large; "
        "then sessions, as by a coordinator that is away",
    ),
    ("bytes of answers that waiting calls of a job get at once", f"{size(ANSWERS_BYTES_MAX)}; the others are refused"),
    ("the prefix of a watch", size(LIMITS.key_bytes)),
    ("watches of a job; changes a watch can look back on", f"{LIMITS.watches:,}; {LIMITS.history_events:,}"),
    ("keys for which requests of a job wait, counted once for each request", f"{LIMITS.waited_keys:,}"),
    ("open named barriers of a job", f"{LIMITS.open_barriers:,}"),
    ("NCCL communicators of a generation, each attempt counted", f"{COMMUNICATORS_MAX:,}"),
    (
        "a message a coordinator, a worker receives",
        f"{size(options.CONTROL_MESSAGE_BYTES_MAX)}; {size(options.DATA_MESSAGE_BYTES_MAX)}",
    ),
    ("streams over gRPC to a worker, up to `FERRORPC_LANES` from each peer", f"{STREAMS_MAX:,}"),
    ("open Watch calls of a coordinator's health service", f"{WATCHES_MAX:,}"),
    ("open status pages of a coordinator", f"{VIEWERS_MAX}; further ones get status 503"),
    ("a chunk of an array", f"{size(CHUNK_BYTES)}; arrays themselves may be as large as memory"),
    ("streams and subgroups of a generation, where ranks share memory", f"{DIRECTORY_ENTRIES:,}"),
    (
        "dimensions of an array; elements along one",
        f"{frames.NDIM_MAX}; 2^{frames.DIMENSION_MAX.bit_length() - 1} - 1",
    ),
    ("a call's signature", size(frames.SIGNATURE_BYTES_MAX)),
)


@pytest.mark.parametrize(("what", "limit"), ROWS)
def test_a_limit_is_documented_as_it_is(what: str, limit: str) -> None:
    row = f"| {what} | {limit} |"
    assert row in (ROOT / "docs" / "operations.md").read_text().splitlines(), f"write into docs/operations.md: {row}"


def test_a_store_value_fits_into_what_a_coordinator_receives() -> None:
    assert LIMITS.value_bytes + LIMITS.frame_bytes <= options.CONTROL_MESSAGE_BYTES_MAX
    assert LIMITS.barrier_bytes + LIMITS.frame_bytes <= options.CONTROL_MESSAGE_BYTES_MAX


def test_a_chunk_and_its_header_fit_into_what_a_worker_receives() -> None:
    assert CHUNK_BYTES + frames.SIGNATURE_BYTES_MAX + 1024 <= options.DATA_MESSAGE_BYTES_MAX


def test_the_coordinators_own_defaults_are_those_of_the_settings() -> None:
    own = Settings()
    assert own.lease_ns == DEFAULTS["lease"] * SECOND
    assert own.grace_ns == DEFAULTS["grace"] * SECOND
    assert own.stall_ns == DEFAULTS["stall"] * SECOND
    assert own.heartbeat_ns == DEFAULTS["heartbeat_interval"] * SECOND
