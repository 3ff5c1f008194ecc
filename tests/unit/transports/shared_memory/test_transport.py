"""Frames through shared memory: what a peer says is not believed, and slots are used again and never shared.

That it is a transport like any other is held by `tests/contract/test_transports.py`."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ferrorpc.errors import CodecError, FerroError, GroupAbortedError, LimitExceededError
from ferrorpc.transports.control import CONTROL_MAX
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_BYTES
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.transports.shared_memory import transport
from ferrorpc.transports.shared_memory.peer_socket import MESSAGE_BYTES_MAX
from ferrorpc.transports.shared_memory.segment import NONCE_BYTES, SIZE_BYTES_MIN, Segment
from ferrorpc.transports.shared_memory.slots import SLOT_BYTES, SLOTS_MAX, SLOTS_MIN, Slot, Slots
from ferrorpc.transports.shared_memory.transport import INLINE_BYTES, SharedMemoryTransport
from ferrorpc.types import DType
from ferrorpc.v1 import shared_memory_pb2, transport_pb2
from ferrorpc.wire.frames import NDIM_MAX, SIGNATURE_BYTES_MAX, Header, Key, encode, frame_prefix
from tests.unit.transports.shared_memory.host_worlds import HostWorld
from tests.waiting import eventually

KEY = Key(0, 0, 1)
LONGEST = "é" * (SIGNATURE_BYTES_MAX // 2)
WIDEST = (1,) * (NDIM_MAX - 1)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment("test", bytes(NONCE_BYTES), SIZE_BYTES_MIN)
    yield made
    made.close()


class Pair:
    """Rank 1 has a transport; rank 0 only its links, to say on them what it likes."""

    def __init__(self, world: HostWorld) -> None:
        self.stranger = world[0]
        self.failures: list[FerroError] = []
        self.lost: list[tuple[int, str]] = []
        self.mailbox = Mailbox(1, self.failures.append)
        self.box = self.mailbox.enter(KEY, "a()", lambda: None)
        self.latch = world[1].latch
        self.transport = SharedMemoryTransport(world[1], self.mailbox, lambda peer, reason: self.lost.append((peer, reason)))

    def tell(self, **body: object) -> None:
        self.stranger.links[1].socket.send(shared_memory_pb2.SharedMemoryMessage(**body).SerializeToString())


@pytest.fixture
def pair() -> Iterator[Pair]:
    with HostWorld(2, listening=False) as world:
        pair = Pair(world)
        yield pair
        pair.transport.close(1.0)


def header_of(size: int, signature: str = "a()") -> Header:
    return Header(0, signature, DType.UINT8, (size,), size)


def frame_of(size: int, offset: int = 0, total: int | None = None) -> bytes:
    return encode(KEY, header_of(size if total is None else total), offset, bytes(size))


BROKEN = {
    "no message": b"\xff\xff\xff",
    "half a frame": frame_of(100)[:-1],
    "a message longer than any": frame_of(MESSAGE_BYTES_MAX),
    "a chunk that nobody has granted": encode(Key(0, 0, 2), header_of(EAGER_BYTES + 5), EAGER_BYTES, bytes(5)),
    "a parcel that begins beyond the end": {"parcel": {"offset": 1 << 50, "size_bytes": 100}},
    "a parcel that ends beyond the end": {"parcel": {"offset": -1, "size_bytes": 200}},
    "a parcel larger than a slot": {"parcel": {"offset": 1 << 20, "size_bytes": SLOT_BYTES + 1}},
    "a parcel with no frame in it": {"parcel": {"offset": 1 << 20, "size_bytes": 1000}},
    "an empty parcel": {"parcel": {"offset": 1 << 20, "size_bytes": 0}},
    "a receipt for nothing": {"receipt": {"offset": 4096}},
    "a probe of a signature longer than any": {"probe": {"signature": "x" * (SIGNATURE_BYTES_MAX + 1)}},
    "an answer that is none": {"probe_answer": {"number": 1, "standing": 0}},
    "an answer of the future": {"probe_answer": {"number": 1, "standing": 99}},
}


@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_ends_the_generation_once_and_nothing_after_it_is_believed(pair: Pair, said: bytes | dict) -> None:
    if isinstance(said, dict):
        for parcel in said.values():
            if parcel.get("offset") == -1:
                parcel["offset"] = pair.stranger.own.size_bytes - 100
        pair.tell(**said)
    else:
        pair.stranger.links[1].socket.send(said)
    eventually(lambda: pair.failures)
    pair.stranger.links[1].socket.send(frame_of(5))
    pair.stranger.links[1].socket.send(b"\xff\xff\xff")
    pair.stranger.close(1.0)
    eventually(lambda: pair.transport._links[0].has_left)
    (error,) = pair.failures
    assert isinstance(error, CodecError | LimitExceededError)
    assert not pair.box.frames
    assert pair.lost == []


def test_who_asks_and_never_reads_the_answers_is_cut_off(pair: Pair) -> None:
    probe = shared_memory_pb2.SharedMemoryMessage(probe={"number": 1, "signature": "a()"}).SerializeToString()
    connection = pair.stranger.links[1].socket.connection
    connection.setblocking(True)
    for _ in range(4 * CONTROL_MAX):
        connection.send(probe)
        if pair.failures:
            break
    (error,) = pair.failures
    assert isinstance(error, LimitExceededError)
    assert f"rank 0 leaves {CONTROL_MAX} answers to it unread" in error.message


def test_after_the_end_of_the_generation_nothing_is_told(pair: Pair) -> None:
    pair.latch.trip(FerroError("it is over"))
    pair.stranger.links[1].socket.send(b"\xff\xff\xff")
    pair.stranger.close(1.0)
    eventually(lambda: pair.transport._links[0].has_left)
    assert pair.failures == []


def test_what_finds_no_memory_ends_the_generation_and_not_the_thread_that_reads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("1 MiB")

    with monkeypatch.context() as patched:
        patched.setattr(transport, "scan", full)
        pair.stranger.links[1].socket.send(frame_of(100))
        eventually(lambda: pair.failures)
    (failure,) = pair.failures
    assert isinstance(failure, LimitExceededError)
    assert "rank 1 has no memory for what rank 0 sent: 1 MiB" in failure.message
    pair.stranger.close(1.0)
    eventually(lambda: pair.transport._links[0].has_left)


def test_a_message_that_finds_no_memory_ends_the_generation(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads from all host peers ends, and they would seem to be silent."""

    def full() -> None:
        raise MemoryError

    monkeypatch.setattr(pair.transport._links[0].socket, "receive", full)
    pair.stranger.links[1].socket.send(frame_of(5))
    cause = eventually(lambda: pair.latch.cause)
    assert isinstance(cause, LimitExceededError)
    assert cause.message == "rank 1 can read no more of what its host peers send: MemoryError"


def test_a_reader_that_fails_while_the_links_are_closed_is_no_failure(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = threading.Event()

    def full() -> None:
        reading.set()
        eventually(lambda: pair.transport._host_peers.is_closing)
        raise MemoryError

    monkeypatch.setattr(pair.transport._links[0].socket, "receive", full)
    pair.stranger.links[1].socket.send(frame_of(5))
    assert reading.wait(20.0)
    pair.transport.close(20.0)
    assert pair.latch.cause is None


def test_a_bug_met_while_reading_ends_the_generation_and_is_shown(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: shown.append(told.exc_value))

    def wrong() -> None:
        raise ZeroDivisionError("so it is")

    monkeypatch.setattr(pair.transport._links[0].socket, "receive", wrong)
    pair.stranger.links[1].socket.send(frame_of(5))
    cause = eventually(lambda: pair.latch.cause)
    assert type(cause) is FerroError
    assert cause.message.endswith("send: ZeroDivisionError: so it is")
    assert isinstance(eventually(lambda: shown)[0], ZeroDivisionError)


def test_a_waiting_message_that_the_system_refuses_ends_the_generation(pair: Pair) -> None:
    """The reader thread writes it: nobody else would be told."""
    ours = pair.transport._links[0].socket
    sent = 0
    while ours.try_send(frame_of(INLINE_BYTES), lambda: None):
        sent += 1
    ours.send(bytes(MESSAGE_BYTES_MAX))
    ours.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    theirs = pair.stranger.links[1].socket
    eventually(lambda: theirs.receive() is None and pair.latch.cause)
    assert isinstance(pair.latch.cause, LimitExceededError)
    assert "refuses what is sent to rank 0: " in pair.latch.cause.message


class TimeLimit(BaseException):
    """As a test runner's signal handler raises it."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimit])
def test_an_interrupt_while_a_message_is_read_ends_the_generation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The message may be lost, and whoever waits for it would wait until its deadline."""

    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(pair.transport._host_peers.reader, "busy_poll", interrupted)
    with pytest.raises(error):
        pair.transport.busy_poll(0, lambda: False)
    (failure,) = pair.failures
    assert isinstance(failure, GroupAbortedError)
    assert (failure.rank, failure.cause) == (1, f"{error.__name__} while it read from rank 0")


def test_a_message_of_a_newer_version_is_passed_over(pair: Pair) -> None:
    pair.stranger.links[1].socket.send(bytes([15 << 3 | 2, 1, 7]))
    pair.stranger.links[1].socket.send(transport_pb2.DataMessage.FromString(frame_of(4, total=8)).SerializeToString())
    pair.stranger.links[1].socket.send(bytes([15 << 3 | 2, 1, 7]) + frame_of(4, offset=4, total=8))
    eventually(lambda: len(pair.box.frames.get((0, 0), ())) == 2)
    assert pair.failures == []


def test_what_a_host_peer_changes_afterwards_changes_nothing_that_was_read(pair: Pair) -> None:
    block = pair.stranger.own.allocate(SLOT_BYTES)
    message = encode(KEY, header_of(100_000), 0, bytes([3]) * 100_000)
    block.array[: len(message)] = np.frombuffer(message, np.uint8)
    pair.tell(parcel={"offset": block.offset, "size_bytes": len(message)})
    eventually(lambda: pair.box.frames)
    block.array[:] = 9
    (frame,) = pair.box.frames[0, 0]
    assert bytes(frame.payload) == bytes([3]) * 100_000
    assert frame.payload.readonly


def test_a_parcel_is_no_longer_than_a_slot_whatever_lies_there(pair: Pair) -> None:
    """Nobody makes room for as much as a peer says that it has."""
    message = frame_of(2 * SLOT_BYTES)
    block = pair.stranger.own.allocate(len(message))
    block.array[:] = np.frombuffer(message, np.uint8)
    pair.tell(parcel={"offset": block.offset, "size_bytes": len(message)})
    eventually(lambda: pair.failures)
    assert f"says that a frame of {len(message)} bytes lies at {block.offset}" in pair.failures[0].message


@pytest.mark.parametrize("size", [INLINE_BYTES, CHUNK_BYTES], ids=["socket", "slots"])
def test_who_waits_for_room_is_told_when_the_host_peer_leaves_and_what_found_none_is_not_counted(pair: Pair, size: int) -> None:
    told, sent, payload = threading.Event(), 0, np.zeros(size, np.uint8)
    while pair.transport.send(0, KEY, header_of(1 << 30), sent * size, payload, told.set):
        sent += 1
    assert pair.transport.traffic() == {0: ("shared_memory", sent * size)}
    pair.stranger.close(1.0)
    assert told.wait(20.0)


def test_the_end_of_the_generation_ends_the_wait_for_a_host_peer_that_reads_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()
    monkeypatch.setattr(HostWorld, "_receive", lambda *_: reading.wait(60.0))
    leave_unread(pair)
    closing = threading.Thread(target=pair.transport.close, args=(60.0,), daemon=True)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    pair.latch.trip(GroupAbortedError(0, "enough"))
    closing.join(20.0)
    assert not closing.is_alive()
    reading.set()


def test_a_close_says_for_which_host_peer_it_waits_and_that_it_gave_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ferrorpc.transports.closing.EXPLAIN_SECONDS", 0.0)
    leave_unread(pair)
    with caplog.at_level("WARNING", "ferrorpc.transports"):
        pair.transport.close(0.5)
    waited, gave_up = [record.getMessage() for record in caplog.records]
    assert waited == "rank 1 closes once rank 0 has received all that it sent"
    assert re.fullmatch(r"rank 1 closes after \d\.\d s, before rank 0 has confirmed that all it sent arrived", gave_up)


def test_a_close_waits_for_a_host_peer_only_as_long_as_it_is_well(pair: Pair) -> None:
    leave_unread(pair)
    closing = threading.Thread(target=pair.transport.close, args=(60.0, pair.latch.unhealthy), daemon=True)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    pair.latch.unhealthy[0] = "rank 0 is stalled"
    closing.join(20.0)
    assert not closing.is_alive()


def leave_unread(pair: Pair) -> None:
    """Sends to a peer that reads nothing until a message waits for room."""
    payload = np.zeros(INLINE_BYTES, np.uint8)
    while pair.transport.send(0, KEY, header_of(1 << 30), 0, payload, lambda: None):
        pass


def test_the_longest_frame_fits_into_its_message_and_into_its_slot() -> None:
    for size, limit in ((INLINE_BYTES, MESSAGE_BYTES_MAX), (CHUNK_BYTES, SLOT_BYTES)):
        header = Header(0, LONGEST, DType.UINT8, (*WIDEST, size), size)
        assert len(frame_prefix(KEY, header, 0, size)) + size <= limit


def test_slots_are_apart_and_the_one_given_back_last_is_taken_first(segment: Segment) -> None:
    slots = Slots(segment, 1)
    taken: list[Slot] = []
    told: list[int] = []
    while (slot := slots.take(lambda: told.append(1))) is not None:
        taken.append(slot)
    assert len(taken) == SLOTS_MAX
    places = sorted(slot.offset for slot in taken)
    assert all(later - earlier >= SLOT_BYTES for earlier, later in itertools.pairwise(places))
    for slot in taken:
        assert slot.array.size == SLOT_BYTES
        assert segment.locate(slot.array) == slot.offset
    for count, slot in enumerate(taken[: SLOTS_MAX // 2], 1):
        assert told == []
        slots.release(slot.offset)
        assert told == [1] * (count == SLOTS_MAX // 2)
    again = slots.take(lambda: None)
    assert again is not None
    assert again.offset == taken[SLOTS_MAX // 2 - 1].offset


def test_a_slot_cannot_be_given_back_twice(segment: Segment) -> None:
    slots = Slots(segment, 1)
    slot = slots.take(lambda: None)
    assert slot is not None
    slots.release(slot.offset)
    with pytest.raises(CodecError, match="none is under way"):
        slots.release(slot.offset)


@pytest.mark.parametrize(("peers", "expected"), [(1, SLOTS_MAX), (3, 5), (1000, SLOTS_MIN)])
def test_many_host_peers_have_fewer_slots_each(segment: Segment, peers: int, expected: int) -> None:
    slots = Slots(segment, peers)
    count = 0
    while slots.take(lambda: None) is not None:
        count += 1
    assert count == expected


def test_a_segment_without_room_is_a_clear_error(segment: Segment) -> None:
    segment.allocate(segment.size_bytes - (4 << 20))
    with pytest.raises(LimitExceededError, match="are free in this rank's shared memory"):
        Slots(segment, 1).take(lambda: None)


def test_who_waits_for_a_slot_is_told_when_there_will_be_none(segment: Segment) -> None:
    slots, told = Slots(segment, 1000), threading.Event()
    taken = [slots.take(told.set) for _ in range(SLOTS_MIN + 1)]
    assert taken[-1] is None
    slots.end()
    assert told.is_set()
    assert slots.take(told.set) is None
    assert taken[0] is not None
    slots.release(taken[0].offset)


def test_no_slot_is_given_out_after_the_end(segment: Segment) -> None:
    slots = Slots(segment, 1)
    assert slots.take(lambda: None) is not None
    slots.end()
    assert slots.take(lambda: None) is None
