"""Every transport between two ranks passes one suite: what is sent arrives, and every end is told as what it is."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from ferrorpc.errors import FerroError, GroupClosedError, PeerLostError
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.base import Transport
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_CHUNKS
from ferrorpc.transports.grpc import transport as grpc_transport_module
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.inproc import InprocTransport, Network
from ferrorpc.transports.mailbox import ABSENT, DIFFERENT, FINISHED, SAME, Box, Mailbox
from ferrorpc.transports.point_to_point import ANY_NUMBER, Ending, PostedReceive
from ferrorpc.transports.routed import RoutedTransport
from ferrorpc.transports.shared_memory import transport as near_transport_module
from ferrorpc.transports.shared_memory.transport import SharedMemoryTransport
from ferrorpc.types import Assignment, DType, Peer
from ferrorpc.wire.frames import NDIM_MAX, POINT_TO_POINT, SIGNATURE_BYTES_MAX, Frame, Header, Key
from ferrorpc.wire.token import Token
from tests.contract.leaving import check_that_recvs_end, leave_after_one_look
from tests.integration.lane_ranks import header_of, random_bytes, send
from tests.unit.transports.shared_memory.host_worlds import HostWorld
from tests.waiting import eventually

SECONDS = 60.0
KEY = Key(0, 0, 1)
SIZES = [0, 1, 17, 12 << 10, (12 << 10) + 1, CHUNK_BYTES, 9 * CHUNK_BYTES + 3]


class End:
    """One rank with its transport."""

    transport: Transport

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost: list[tuple[int, str]] = []
        self.failures: list[FerroError] = []
        self.latch = Latch()
        self.mailbox = Mailbox(rank, self.failures.append)

    def lose(self, peer: int, reason: str) -> None:
        self.lost.append((peer, reason))

    def box(self, key: Key, signature: str = "a()") -> Box:
        return self.mailbox.enter(key, signature, lambda: None)

    def send(self, peer: End, key: Key, data: np.ndarray, slot: int = 0) -> None:
        """Sends a whole message, waiting for room."""
        send(self, peer.rank, key, data, slot)

    def send_one(self, peer: End, number: int) -> bool:
        return self.transport.send(peer.rank, Key(0, 0, number), header_of(1), 0, random_bytes(1), lambda: None)


def received(box: Box, source: End, slot: int = 0) -> list[Frame]:
    return list(box.frames.get((source.rank, slot), ()))


def wait_for_message(box: Box, source: End, size: int, slot: int = 0) -> bytes:
    def complete() -> bool:
        frames = received(box, source, slot)
        return bool(frames) and sum(len(frame.payload) for frame in frames) == size

    eventually(complete, f"all of {size} bytes")
    return b"".join(frame.payload for frame in received(box, source, slot))


class TransportContract(ABC):
    """What `transports/base.py` promises."""

    @abstractmethod
    @contextmanager
    def ends(self) -> Iterator[tuple[End, End]]:
        """Two ranks of a new world; nothing was sent between them."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[End, End]]:
        with self.ends() as pair:
            yield pair

    @pytest.mark.parametrize("size", SIZES)
    def test_a_message_arrives_whole_and_in_order(self, pair: tuple[End, End], size: int) -> None:
        first, second = pair
        data = random_bytes(size)
        box = second.box(KEY)
        first.send(second, KEY, data)
        assert wait_for_message(box, first, size) == data.tobytes()
        frames = received(box, first)
        assert [frame.offset for frame in frames] == list(range(0, max(size, 1), CHUNK_BYTES))
        assert all(frame.header == header_of(size) and frame.source == first.rank for frame in frames)

    @pytest.mark.parametrize("size", [12 << 10, CHUNK_BYTES])
    def test_the_longest_header_is_carried(self, pair: tuple[End, End], size: int) -> None:
        first, second = pair
        header = Header(7, "é" * (SIGNATURE_BYTES_MAX // 2), DType.UINT8, (*(1,) * (NDIM_MAX - 1), size), size)
        box = second.box(KEY, header.signature)
        assert first.transport.send(second.rank, KEY, header, 0, random_bytes(size), lambda: None)
        assert wait_for_message(box, first, size, slot=7) == random_bytes(size).tobytes()
        assert received(box, first, slot=7)[0].header == header

    def test_small_and_large_messages_keep_the_order_in_which_they_were_sent(self, pair: tuple[End, End]) -> None:
        first, second = pair
        order: list[int] = []
        deliver = second.mailbox.deliver

        def note(frame: Frame) -> bool:
            order.append(frame.key.number)
            return deliver(frame)

        second.mailbox.deliver = note  # type: ignore[method-assign]
        sizes = [1, 200_000, 0, 12 << 10, CHUNK_BYTES, 5, 100_000, 0]
        for number, size in enumerate(sizes):
            first.send(second, Key(0, 0, number), random_bytes(size))
        eventually(lambda: len(order) == len(sizes), "all messages")
        assert order == list(range(len(sizes)))

    def test_both_directions_work_at_once(self, pair: tuple[End, End]) -> None:
        data = [random_bytes(23 * CHUNK_BYTES), random_bytes(20 * CHUNK_BYTES)]
        boxes = [end.box(KEY) for end in pair]
        threads = [
            threading.Thread(target=pair[place].send, args=(pair[1 - place], KEY, data[place]), daemon=True)
            for place in range(2)
        ]
        for thread in threads:
            thread.start()
        for place in range(2):
            assert wait_for_message(boxes[place], pair[1 - place], data[1 - place].size) == data[1 - place].tobytes()

    @pytest.mark.parametrize("size", [1000, 1_000_000])
    def test_the_payload_may_be_changed_as_soon_as_send_returns(self, pair: tuple[End, End], size: int) -> None:
        first, second = pair
        box = second.box(KEY)
        data = np.ones(size, np.uint8)
        assert first.transport.send(second.rank, KEY, header_of(size), 0, data, lambda: None)
        data[:] = 7
        assert wait_for_message(box, first, size) == bytes([1]) * size

    def test_what_has_arrived_stays_as_it_is(self, pair: tuple[End, End]) -> None:
        """However long the receiver keeps it, and whatever comes after it."""
        first, second = pair
        boxes = {number: second.box(Key(0, 0, number)) for number in range(30)}
        for number in boxes:
            first.send(second, Key(0, 0, number), np.full(CHUNK_BYTES, number, np.uint8))
        for number, box in boxes.items():
            assert wait_for_message(box, first, CHUNK_BYTES) == bytes([number]) * CHUNK_BYTES

    def test_grants_come_back_to_the_sender(self, pair: tuple[End, End]) -> None:
        first, second = pair
        key = Key(3, 5, 1)
        box, receiving = first.box(key), second.box(key)
        first.send(second, key, random_bytes(10), slot=6)
        wait_for_message(receiving, first, 10, slot=6)
        second.transport.grant(first.rank, key, 6)
        eventually(lambda: box.granted == {(second.rank, 6)}, "the grant")

    def test_a_probe_is_answered_with_where_the_peer_stands(self, pair: tuple[End, End]) -> None:
        first, second = pair
        finished, entered, other, not_entered = (Key(0, 0, number) for number in range(1, 5))
        boxes = {key: first.box(key, "mine()") for key in (finished, entered, other, not_entered)}
        second.box(finished, "mine()")
        second.mailbox.leave(finished)
        second.box(entered, "mine()")
        second.box(other, "theirs()")
        for key in boxes:
            first.transport.probe(second.rank, key, "mine()")
        eventually(lambda: all(box.answers for box in boxes.values()), "four answers")
        assert [box.answers[second.rank].standing for box in boxes.values()] == [FINISHED, SAME, DIFFERENT, ABSENT]
        assert boxes[not_entered].answers[second.rank][2:] == (3, "theirs()")
        (mismatch,) = first.failures
        assert mismatch.fields["signatures"] == {first.rank: "mine()", second.rank: "theirs()"}

    def test_that_a_peer_has_closed_a_group_is_told_after_what_it_sent(self, pair: tuple[End, End]) -> None:
        first, second = pair
        deliver = second.mailbox.deliver

        def deliver_late(frame: Frame) -> bool:
            time.sleep(0.3)
            return deliver(frame)

        second.mailbox.deliver = deliver_late  # type: ignore[method-assign]
        comes, ends = (PostedReceive((5, first.rank, tag), lambda: None) for tag in (0, 1))
        second.mailbox.post(comes)
        second.mailbox.post(ends)
        first.send(second, Key(5, POINT_TO_POINT, 1), random_bytes(100_000))
        first.mailbox.retire(5, [])
        second.transport.probe(first.rank, Key(5, POINT_TO_POINT, ANY_NUMBER), "recv()")
        eventually(lambda: ends.ending is Ending.SENDER_CLOSED, "the end of the other recv")
        assert (comes.message is not None, comes.ending) == (True, None)

    def test_closing_flushes_what_was_sent_and_fails_nobody(self, pair: tuple[End, End]) -> None:
        first, second = pair
        data = random_bytes(EAGER_CHUNKS * CHUNK_BYTES)
        box = second.box(KEY)
        first.send(second, KEY, data)
        started = time.monotonic()
        first.transport.close(SECONDS)
        assert time.monotonic() - started < SECONDS
        assert wait_for_message(box, first, data.size) == data.tobytes()
        first.transport.close(SECONDS)
        assert second.lost == first.lost == []
        with pytest.raises(GroupClosedError):
            first.transport.send(second.rank, Key(0, 0, 2), header_of(0), 0, None, lambda: None)

    @pytest.mark.parametrize("had_a_lane", [True, False])
    def test_only_what_is_still_sent_to_a_rank_that_left_finds_its_link_lost(
        self, pair: tuple[End, End], had_a_lane: bool
    ) -> None:
        first, second = pair
        if had_a_lane:
            box = first.box(KEY)
            second.send(first, KEY, random_bytes(5))
            wait_for_message(box, second, 5)
        first.transport.close(SECONDS)
        time.sleep(0.1)
        assert second.lost == []
        for number in (2, 3):
            assert second.send_one(first, number)
        eventually(lambda: second.lost, "the lost link")
        time.sleep(0.1)
        assert second.lost == [(first.rank, PEER_LEFT)]
        assert second.transport.lost() == {first.rank: PEER_LEFT}
        assert second.failures == []

    def test_who_waits_for_a_rank_that_left_is_told_when_it_asks_again(self, pair: tuple[End, End]) -> None:
        first, second = pair
        box = first.box(KEY)
        second.send(first, KEY, random_bytes(CHUNK_BYTES))
        wait_for_message(box, second, CHUNK_BYTES)
        first.send(second, KEY, random_bytes(CHUNK_BYTES))
        first.transport.close(SECONDS)

        def told() -> bool:
            second.transport.probe(first.rank, KEY, "a()")
            return bool(second.lost)

        eventually(told, "the lost link")
        wait_for_message(second.box(KEY), first, CHUNK_BYTES)
        assert second.lost == [(first.rank, PEER_LEFT)]

    def test_recvs_from_a_rank_that_left_end_without_a_lost_link(self, pair: tuple[End, End]) -> None:
        check_that_recvs_end(*pair)

    def test_what_a_rank_sent_before_it_left_may_be_found_after_it_was_asked_for_once(self, pair: tuple[End, End]) -> None:
        """Whoever asks has looked before, and is held up between the two while the rest arrives."""
        first, second = pair
        box = second.box(KEY)
        first.send(second, KEY, random_bytes(5))
        wait_for_message(box, first, 5)
        first.transport.close(SECONDS)
        time.sleep(0.1)
        second.transport.probe(first.rank, KEY, "a()")
        time.sleep(0.1)
        assert second.lost == []
        second.transport.probe(first.rank, KEY, "a()")
        eventually(lambda: second.lost, "the lost link")

    def test_a_rank_that_leaves_while_it_is_asked_for_is_not_missed(self, pair: tuple[End, End]) -> None:
        first, second = pair
        box = first.box(KEY)
        second.send(first, KEY, random_bytes(5))
        wait_for_message(box, second, 5)
        leave_after_one_look(second.transport, first.rank)
        second.transport.probe(first.rank, KEY, "a()")
        time.sleep(0.1)
        assert second.lost == []

    def test_a_broken_generation_reports_no_links_and_raises_its_cause(self, pair: tuple[End, End]) -> None:
        first, second = pair
        first.send(second, KEY, random_bytes(1))
        first.latch.trip(PeerLostError(second.rank, "signal 9"))
        second.transport.close(1.0)
        time.sleep(0.2)
        assert first.lost == []
        with pytest.raises(PeerLostError, match="signal 9"):
            first.send_one(second, 2)
        first.transport.grant(second.rank, KEY, 0)
        started = time.monotonic()
        first.transport.close(SECONDS)
        assert time.monotonic() - started < SECONDS / 3


class BoundedTransportContract(TransportContract):
    """Of transports between processes, whose lanes can be full and are counted."""

    lanes = 1

    kind: str

    def test_the_bytes_of_payloads_are_counted(self, pair: tuple[End, End]) -> None:
        first, second = pair
        box = second.box(KEY)
        for slot, size in enumerate([0, 100, 100_000, CHUNK_BYTES + 5]):
            first.send(second, KEY, random_bytes(size), slot)
            wait_for_message(box, first, size, slot)
        eventually(lambda: first.transport.traffic().get(second.rank) == (self.kind, CHUNK_BYTES + 100_105), "the count")

    @pytest.mark.parametrize("size", [12 << 10, CHUNK_BYTES])
    def test_a_full_lane_says_so_and_tells_when_there_is_room_again(self, pair: tuple[End, End], size: int) -> None:
        first, second = pair
        box = second.box(KEY)
        reading = threading.Event()
        deliver = second.mailbox.deliver
        second.mailbox.deliver = lambda frame: (reading.wait(SECONDS), deliver(frame))[1]  # type: ignore[method-assign]
        told: list[int] = []
        payload, accepted, full_since = random_bytes(size), 0, 0.0

        def room() -> None:
            told.append(1)

        def send() -> bool:
            return first.transport.send(second.rank, KEY, header_of(1 << 30), accepted * size, payload, room)

        # On a busy machine a lane may pause before it is full: it is once nothing moves for a while.
        while not full_since or time.monotonic() - full_since < 0.3:
            if send():
                accepted, full_since = accepted + 1, 0.0
                assert accepted * size <= 100 << 20, "the lane takes everything"
            elif told or not full_since:
                told.clear()
                full_since = time.monotonic()
            else:
                time.sleep(0.01)
        reading.set()
        eventually(lambda: told, "room")
        time.sleep(0.1)
        assert len(told) <= self.lanes  # each lane that was full tells once
        eventually(send, "room for one")
        eventually(lambda: len(received(box, first)) == accepted + 1, "every accepted chunk")
        assert [frame.offset for frame in received(box, first)] == [number * size for number in range(accepted + 1)]

    @pytest.mark.parametrize("size", [1, CHUNK_BYTES])
    def test_what_close_overtakes_is_not_said_to_be_sent(
        self, pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        first, second = pair
        assert first.send_one(second, 1)

        def overtaken(build: Any, *parts: Any) -> bytes:
            first.transport.close(1.0)
            built: bytes = build(*parts)
            return built

        builders = [
            (grpc_transport_module, "encode"),
            (near_transport_module, "encode"),
            (near_transport_module, "frame_prefix"),
        ]
        for module, name in builders:
            monkeypatch.setattr(module, name, partial(overtaken, getattr(module, name)))
        with pytest.raises(GroupClosedError, match=r"by close\(\) or reform\(\)"):
            first.transport.send(second.rank, KEY, header_of(size), 0, random_bytes(size), lambda: None)

    def test_who_waits_for_room_is_told_when_the_transport_closes(self, pair: tuple[End, End]) -> None:
        first, second = pair
        reading, told = threading.Event(), threading.Event()
        second.mailbox.deliver = lambda frame: reading.wait(SECONDS) and None  # type: ignore[method-assign]
        payload = random_bytes(CHUNK_BYTES)
        while first.transport.send(second.rank, KEY, header_of(1 << 30), 0, payload, told.set):
            pass
        first.transport.close(0.2)
        assert told.wait(SECONDS)
        with pytest.raises(GroupClosedError):
            first.transport.send(second.rank, KEY, header_of(1 << 30), 0, payload, told.set)
        reading.set()


def assignment_of(rank: int, servers: list[WorkerServer]) -> Assignment:
    peers = tuple(Peer(number, f"member-{number}", address=server.address) for number, server in enumerate(servers))
    return Assignment("j", "c", 1, rank, peers)


@contextmanager
def grpc_servers(count: int, lanes: int = 1) -> Iterator[list[WorkerServer]]:
    servers = [WorkerServer("127.0.0.1", "127.0.0.1", Token(fixed="secret"), lanes=lanes) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def grpc_transport(end: End, servers: list[WorkerServer]) -> GrpcTransport:
    assignment = assignment_of(end.rank, servers)
    return GrpcTransport(servers[end.rank], assignment, end.mailbox, end.latch, SYSTEM_CLOCK, end.lose)


class TestGrpc(BoundedTransportContract):
    """Streams between two servers."""

    kind = "grpc"
    lanes = 1

    @contextmanager
    def ends(self) -> Iterator[tuple[End, End]]:
        with grpc_servers(2, self.lanes) as servers:
            first, second = End(0), End(1)
            for end in (first, second):
                end.transport = grpc_transport(end, servers)
            yield first, second

    def test_closing_leaves_no_thread_behind_although_the_peer_reads_nothing(self, pair: tuple[End, End]) -> None:
        first, second = pair
        reading = threading.Event()
        second.mailbox.deliver = lambda frame: reading.wait(SECONDS) and None  # type: ignore[method-assign]
        payload, before = random_bytes(CHUNK_BYTES), set(threading.enumerate())
        while first.transport.send(second.rank, KEY, header_of(1 << 30), 0, payload, lambda: None):
            pass
        lanes = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("ferrorpc-lane-")}
        assert lanes
        first.transport.close(0.2)
        eventually(lambda: not any(thread.is_alive() for thread in lanes), "the end of every lane")
        reading.set()

    def test_a_stream_that_breaks_after_its_rank_has_said_goodbye_is_no_loss(self, pair: tuple[End, End]) -> None:
        first, second = pair
        assert isinstance(first.transport, GrpcTransport)
        first.transport.incoming_ended(second.rank, 2, "")
        first.transport.incoming_ended(second.rank, 0, "its stream broke")
        assert first.lost == []


class TestGrpcWithSeveralLanes(TestGrpc):
    """Three streams each way, on three connections."""

    lanes = 3


class TestSharedMemory(BoundedTransportContract):
    """Segments and sockets of one host."""

    kind = "shared_memory"

    @contextmanager
    def ends(self) -> Iterator[tuple[End, End]]:
        with HostWorld(2, listening=False) as world:
            first, second = End(0), End(1)
            for end in (first, second):
                end.latch = world[end.rank].latch
                end.transport = SharedMemoryTransport(world[end.rank], end.mailbox, end.lose)
            yield first, second


class TestInproc(TransportContract):
    """Ranks of one process, whose lanes take everything."""

    @contextmanager
    def ends(self) -> Iterator[tuple[End, End]]:
        network = Network(SYSTEM_CLOCK, None, 0)
        first, second = End(0), End(1)
        for end in (first, second):
            end.transport = InprocTransport(end.rank, 2, network, end.mailbox, end.latch, end.lose)
        yield first, second


class Routed(BoundedTransportContract):
    """Ranks 0 and 1 share memory, rank 2 is elsewhere."""

    ranks: tuple[int, int]

    @contextmanager
    def ends(self) -> Iterator[tuple[End, End]]:
        with ExitStack() as stack:
            servers = stack.enter_context(grpc_servers(3))
            world = stack.enter_context(HostWorld(3, ["auto", "auto", "grpc"], listening=False))
            ends = [End(rank) for rank in range(3)]
            for end in ends:
                end.latch = world[end.rank].latch
                end.transport = grpc_transport(end, servers)
            for end in ends[:2]:
                near = SharedMemoryTransport(world[end.rank], end.mailbox, end.lose)
                end.transport = RoutedTransport(near, near.peers, end.transport, SYSTEM_CLOCK)
            yield ends[self.ranks[0]], ends[self.ranks[1]]
            for end in ends:
                end.transport.close(1.0)


@pytest.mark.shared_memory
class TestRoutedToHostPeers(Routed):
    kind = "shared_memory"
    ranks = (0, 1)


class TestRoutedToOtherHosts(Routed):
    kind = "grpc"
    ranks = (1, 2)
