"""The gRPC lane on real sockets, two ranks in one process: what is sent arrives, and every end is told as what it is."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from ferrorpc.errors import (
    AuthenticationError,
    CodecError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    LimitExceededError,
    PeerLostError,
    PermissionDeniedError,
    StaleGenerationError,
    VersionMismatchError,
)
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc import server as server_module, transport as transport_module
from ferrorpc.transports.grpc.send_queue import FRAME_BYTES_MAX, FRAMES_MAX
from ferrorpc.transports.grpc.server import METHOD, WorkerServer
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire import options
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.frames import Key, encode
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION
from ferrorpc.wire.token import Token
from tests.integration.lane_ranks import SECONDS, Rank, assignment_of, header_of, pair_of, random_bytes, send, two_servers
from tests.integration.slow_link import slow_link
from tests.waiting import eventually


@pytest.fixture(params=[1])
def servers(request: pytest.FixtureRequest) -> Iterator[list[WorkerServer]]:
    """Two servers; with as many lanes as an indirect parameter says."""
    with two_servers(request.param) as made:
        yield made


@pytest.fixture
def pair(servers: list[WorkerServer]) -> list[Rank]:
    return pair_of(servers)


def test_a_full_lane_says_so_and_tells_when_there_is_room_again(servers: list[WorkerServer]) -> None:
    sender = Rank(0, servers[0]).enter(assignment_of(0, servers))
    told = [1]
    chunk = random_bytes(CHUNK_BYTES)
    accepted = 0
    # Nobody has registered for this generation on the other side yet: the stream waits, and its queue fills, as slowly as
    # what is between the two takes what it has room for.
    while told:
        told.clear()
        while sender.transport.send(1, Key(0, 0, 1), header_of(CHUNK_BYTES, slot=accepted), 0, chunk, lambda: told.append(1)):
            accepted += 1
            assert accepted <= 100, "the lane takes everything"
        time.sleep(0.3)
    assert accepted >= min(FRAMES_MAX, FRAME_BYTES_MAX // CHUNK_BYTES)
    receiver = Rank(1, servers[1]).enter(assignment_of(1, servers))
    eventually(lambda: told, "room")
    time.sleep(0.1)
    assert told == [1]
    box = receiver.box(Key(0, 0, 1))
    eventually(lambda: len(box.frames) == accepted, "every accepted chunk")


@pytest.mark.parametrize("servers", [3], indirect=True, ids=["three_lanes"])
def test_all_of_a_peer_that_left_is_here_once_each_of_its_streams_has_ended(pair: list[Rank]) -> None:
    key = Key(0, 0, 1)
    box = pair[1].box(key)
    send(pair[0], 1, key, random_bytes(3 * CHUNK_BYTES))
    eventually(lambda: len(box.frames.get((0, 0), ())) == 3, "all chunks")
    streams = list(pair[1].transport._links[0].incoming.values())
    assert len(streams) == 3
    # The goodbye of the first stream overtakes the end of the others.
    pair[1].transport.incoming_ended(0, 3, "")
    for _ in range(3):
        pair[1].transport.probe(0, key, "a()")
    assert pair[1].lost == []
    for _ in range(2):
        pair[1].transport.incoming_ended(0, 3, "")
    pair[1].transport.probe(0, key, "a()")
    assert pair[1].lost == []
    pair[1].transport.probe(0, key, "a()")
    assert pair[1].lost == [(0, PEER_LEFT)]


@pytest.mark.parametrize("servers", [3], indirect=True, ids=["three_lanes"])
def test_a_stream_that_breaks_is_a_lost_link_whichever_of_several_it_is(pair: list[Rank]) -> None:
    box = pair[1].box(Key(0, 0, 1))
    send(pair[0], 1, Key(0, 0, 1), random_bytes(3 * CHUNK_BYTES))
    eventually(lambda: len(box.frames.get((0, 0), ())) == 3, "all chunks")
    pair[0].transport._links[1].lanes[2].cancel()
    eventually(lambda: pair[1].lost, "the lost link")
    assert [peer for peer, _ in pair[1].lost] == [0]


def test_a_peer_that_does_not_answer_is_told_once_with_the_reason(servers: list[WorkerServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        deaf = SimpleNamespace(address=f"127.0.0.1:{silent.getsockname()[1]}")
        rank = Rank(0, servers[0]).enter(assignment_of(0, [servers[0], deaf]), dial_seconds=1.0)
        for number in range(3):
            rank.transport.send(1, Key(0, 0, number), header_of(1), 0, random_bytes(1), lambda: None)
        eventually(lambda: rank.lost, "the lost link")
        time.sleep(0.3)
    ((peer, reason),) = rank.lost
    assert peer == 1
    assert rank.transport.lost() == {1: reason}
    assert reason.startswith("it could not be reached in ")
    assert "UNAVAILABLE" in reason
    assert deaf.address in reason


def test_a_peer_is_not_reached_until_it_answers() -> None:
    """Its server waits for a transport of this generation."""
    with two_servers(open_timeout_seconds=SECONDS) as servers:
        first = Rank(0, servers[0]).enter(assignment_of(0, servers))
        assert first.transport.unreached() == {}
        first.transport.probe(1, Key(0, 0, 1), "a()")
        assert first.transport.unreached() == {}, "it may answer in a moment"
        found = eventually(first.transport.unreached, "that the peer does not answer")
        assert re.fullmatch(rf"not reached at {re.escape(servers[1].address)} in \d+\.\d s", found.pop(1))
        assert not found
        first.latch.unhealthy[1] = "it has stalled"
        assert first.transport.unreached() == {}, "it is known to be there, and to be busy"
        first.latch.unhealthy.clear()
        Rank(1, servers[1]).enter(assignment_of(1, servers))
        eventually(lambda: not first.transport.unreached(), "the answer")


def test_a_peer_at_whose_address_nobody_listens_is_given_up_long_before_one_that_is_silent(servers: list[WorkerServer]) -> None:
    gone = WorkerServer("127.0.0.1", "127.0.0.1")
    gone.close()
    rank = Rank(0, servers[0]).enter(assignment_of(0, [servers[0], gone]), dial_seconds=100.0)
    rank.transport.send(1, Key(0, 0, 1), header_of(1), 0, random_bytes(1), lambda: None)
    eventually(lambda: rank.lost, "the lost link", seconds=SECONDS)
    assert gone.address in rank.lost[0][1]


def test_a_stream_of_a_newer_generation_waits_for_its_receiver(servers: list[WorkerServer]) -> None:
    sender = Rank(0, servers[0]).enter(assignment_of(0, servers, generation=2))
    receiver = Rank(1, servers[1]).enter(assignment_of(1, servers, generation=1))
    send(sender, 1, Key(0, 0, 1), random_bytes(9))
    time.sleep(0.3)
    assert sender.failures == []
    receiver.transport.close(1.0)
    box = receiver.enter(assignment_of(1, servers, generation=2)).box(Key(0, 0, 1))
    eventually(lambda: box.frames, "the frame")
    assert sender.lost == []


def test_a_stream_of_an_older_generation_is_refused_with_the_newer_one(servers: list[WorkerServer]) -> None:
    Rank(1, servers[1]).enter(assignment_of(1, servers, generation=7))
    stale = Rank(0, servers[0]).enter(assignment_of(0, servers, generation=6))
    send(stale, 1, Key(0, 0, 1), random_bytes(9))
    eventually(lambda: stale.failures, "the refusal")
    (error,) = stale.failures
    assert isinstance(error, StaleGenerationError)
    assert error.fields["generation"] == 7
    assert stale.lost == []


def refusal_of(server: WorkerServer, **changes: object) -> FerroError:
    """What a stranger is told that opens a stream like rank 0 of generation 1 would, but for these changes."""
    fields = {
        "protocol_version": DATA_PROTOCOL_VERSION,
        "job": "j",
        "cluster_id": "c",
        "generation": 1,
        "source_rank": 0,
        "target_rank": 1,
        "token": "secret",
    }
    opening = transport_pb2.DataMessage(open=transport_pb2.Open(**(fields | changes)))
    return answer_to(server, [opening.SerializeToString()])


def answer_to(server: WorkerServer, messages: list[bytes]) -> FerroError:
    """The refusal that ends a stream with these messages."""
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from messages
        hold.wait(SECONDS)

    with grpc.insecure_channel(server.address, options=options.data_channel()) as channel:
        try:
            for data in channel.stream_stream(METHOD)(requests(), timeout=SECONDS):
                answer = transport_pb2.ControlMessage.FromString(data)
                if answer.HasField("refused"):
                    return restore(answer.refused)
        finally:
            hold.set()
    raise AssertionError("the stream was not refused")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token": "guess"}, AuthenticationError),
        ({"token": "", "generation": 0}, AuthenticationError),
        ({"protocol_version": 99}, VersionMismatchError),
        ({"job": "another"}, PermissionDeniedError),
        ({"cluster_id": "another"}, StaleGenerationError),
        ({"generation": 0}, StaleGenerationError),
        ({"generation": 9}, StaleGenerationError),
        ({"target_rank": 0, "source_rank": 1}, PermissionDeniedError),
        ({"source_rank": 1}, PermissionDeniedError),
        ({"source_rank": 2}, PermissionDeniedError),
    ],
    ids=str,
)
def test_who_does_not_belong_is_refused_and_learns_why(pair: list[Rank], changes: dict, expected: type) -> None:
    error = refusal_of(pair[1].server, **changes)
    assert type(error) is expected
    assert pair[1].lost == pair[1].failures == []
    assert "generation" not in error.fields or expected is StaleGenerationError


OLD, NEW, NEWEST = (f"the-{which}-token-of-a-job" for which in ("old", "new", "newest"))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The token files of two ranks."""
    found = [tmp_path / str(rank) for rank in range(2)]
    for path in found:
        path.write_text(OLD)
    return found


@pytest.fixture
def servers_with_files(files: list[Path]) -> Iterator[list[WorkerServer]]:
    with contextlib.ExitStack() as stack:
        made = [WorkerServer("127.0.0.1", "127.0.0.1", Token(str(path)), open_timeout_seconds=2.0) for path in files]
        for server in made:
            stack.callback(server.close)
        yield made


def seen(server: WorkerServer, token: str) -> None:
    eventually(lambda: server.token._value == token, "the server has looked at its file")


@pytest.mark.parametrize("replaced", [0, 1])
def test_ranks_reach_each_other_while_only_one_of_them_has_the_new_token(
    files: list[Path], servers_with_files: list[WorkerServer], replaced: int
) -> None:
    """A link that is dialled for the first time then, late in a generation, is no reason to end that."""
    ranks = pair_of(servers_with_files)
    files[replaced].write_text(NEW)
    seen(servers_with_files[replaced], NEW)
    for sender, receiver in (ranks, ranks[::-1]):
        key = Key(0, 0, 1 + sender.rank)
        box = receiver.box(key)
        send(sender, receiver.rank, key, random_bytes(1))
        eventually(lambda box=box, sender=sender: box.frames or sender.failures, "the frame")
    assert ranks[0].failures == ranks[1].failures == []


def test_a_token_that_was_replaced_twice_is_refused_also_where_nobody_dialled_meanwhile(
    files: list[Path], servers_with_files: list[WorkerServer]
) -> None:
    pair_of(servers_with_files)
    for token in (NEW, NEWEST):
        files[1].write_text(token)
        seen(servers_with_files[1], token)
    assert type(refusal_of(servers_with_files[1], token=OLD, token_before=OLD)) is AuthenticationError
    for known in (NEW, NEWEST):
        error = refusal_of(servers_with_files[1], token=known, generation=0)
        assert type(error) is StaleGenerationError, "its token is accepted"


def test_a_second_stream_of_one_peer_is_refused(pair: list[Rank]) -> None:
    box = pair[1].box(Key(0, 0, 1))
    send(pair[0], 1, Key(0, 0, 1), random_bytes(1))
    eventually(lambda: box.frames, "the frame")
    assert "twice" in refusal_of(pair[1].server).message
    assert "may have 16" in refusal_of(pair[1].server, lane=16).message


@pytest.mark.parametrize("first", [b"\xff\xff", b"", transport_pb2.DataMessage(goodbye={}).SerializeToString()], ids=bytes.hex)
def test_a_stream_that_begins_with_no_open_is_refused(pair: list[Rank], first: bytes) -> None:
    assert type(answer_to(pair[1].server, [first])) is CodecError


def test_a_stream_that_says_nothing_is_ended(servers: list[WorkerServer]) -> None:
    hold = threading.Event()
    with grpc.insecure_channel(servers[0].address, options=options.data_channel()) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            list(channel.stream_stream(METHOD)(iter(lambda: hold.wait(SECONDS), None), timeout=SECONDS))
        hold.set()
    assert raised.value.code() is grpc.StatusCode.CANCELLED


def test_bytes_that_are_no_message_end_the_generation_with_a_codec_error_on_both_sides(pair: list[Rank]) -> None:
    send(pair[0], 1, Key(0, 0, 1), random_bytes(1))
    pair[0].transport._links[1].lanes[0].queue.put(b"\x22\x03\x09\x09\x09")
    eventually(lambda: pair[0].failures and pair[1].failures, "the codec error")
    assert [type(rank.failures[0]) for rank in pair] == [CodecError, CodecError]
    time.sleep(0.1)
    assert [len(rank.failures) for rank in pair] == [1, 1]
    assert [rank.lost for rank in pair] == [[], []]


def test_a_message_over_the_limit_ends_its_stream_and_nothing_else(pair: list[Rank]) -> None:
    send(pair[0], 1, Key(0, 0, 1), random_bytes(1))
    pair[0].transport._links[1].lanes[0].queue.put(bytes(options.DATA_MESSAGE_BYTES_MAX + 1))
    eventually(lambda: pair[0].lost and pair[1].lost, "the lost links")
    assert "RESOURCE_EXHAUSTED" in pair[0].lost[0][1]
    assert type(refusal_of(pair[1].server, token="guess")) is AuthenticationError


def test_a_frame_that_generated_code_made_arrives_like_our_own(pair: list[Rank]) -> None:
    box = pair[1].box(Key(0, 0, 1))
    parsed = transport_pb2.DataMessage.FromString(encode(Key(0, 0, 1), header_of(3), 0, b"abc"))
    send(pair[0], 1, Key(0, 0, 2), random_bytes(1))
    pair[0].transport._links[1].lanes[0].queue.put(parsed.SerializeToString())
    eventually(lambda: box.frames, "the frame")
    assert bytes(box.frames[0, 0][0].payload) == b"abc"


def test_a_new_generation_on_the_same_servers_hears_nothing_of_the_old_one(
    pair: list[Rank], servers: list[WorkerServer]
) -> None:
    send(pair[0], 1, Key(0, 0, 1), random_bytes(5))
    for rank in pair:
        rank.transport.close(1.0)
    for rank in pair:
        rank.enter(assignment_of(rank.rank, servers, generation=2))
    boxes = [rank.box(Key(0, 0, 1)) for rank in pair]
    for rank in pair:
        send(rank, 1 - rank.rank, Key(0, 0, 1), random_bytes(20 + rank.rank))
    for rank, box in zip(pair, boxes, strict=True):
        eventually(lambda b=box: b.frames, "the frame")
        (frame,) = box.frames[1 - rank.rank, 0]
        assert frame.header.total == 21 - rank.rank
    assert [rank.lost + rank.failures for rank in pair] == [[], []]


def test_an_ipv6_host_is_written_in_brackets() -> None:
    server = WorkerServer("::1", "::1")
    assert server.address.startswith("[::1]:")
    server.close()


def test_a_lane_is_not_lost_for_what_takes_its_time_on_a_slow_link(servers: list[WorkerServer]) -> None:
    """Pings of both sides, or their answers, wait behind some seconds of data on the lane's connection."""
    with slow_link(servers[1].address, bytes_per_second=12_000) as link:
        plain = assignment_of(0, servers)
        peers = (plain.peers[0], replace(plain.peers[1], address=link.address))
        sender = Rank(0, servers[0]).enter(replace(plain, peers=peers))
        receiver = Rank(1, servers[1]).enter(assignment_of(1, servers))
        key, data = Key(0, 0, 1), random_bytes(60_000)  # as much as may be under way on a new connection
        box = receiver.box(key)
        send(sender, 1, key, data)
        eventually(lambda: sender.lost or receiver.lost or box.frames, "the message")
        assert sender.lost == receiver.lost == []


@pytest.mark.parametrize(("lease_seconds", "kept"), [(3.0, False), (60.0, True)])
def test_a_lane_outlives_a_peer_that_takes_nothing_for_as_long_as_its_lease(lease_seconds: float, kept: bool) -> None:
    """As a process that a debugger stopped, once its socket's buffer is full."""
    with two_servers(lease_seconds=lease_seconds) as servers, slow_link(servers[1].address, buffer_bytes=1 << 16) as link:
        plain = assignment_of(0, servers)
        peers = (plain.peers[0], replace(plain.peers[1], address=link.address))
        sender = Rank(0, servers[0]).enter(replace(plain, peers=peers))
        receiver = Rank(1, servers[1]).enter(assignment_of(1, servers))
        keys = [Key(0, 0, number) for number in range(2)]
        boxes, data = [receiver.box(key) for key in keys], random_bytes(8 * CHUNK_BYTES)
        send(sender, 1, keys[0], data)  # which lets gRPC send so much ahead that the buffer can be full
        eventually(lambda: len(boxes[0].frames) == 1, "the first message")
        link.bytes_per_second = 20
        sending = threading.Thread(target=send, args=(sender, 1, keys[1], data), daemon=True)
        sending.start()
        time.sleep(6.0)
        if not kept:
            eventually(lambda: sender.lost, "the lost link")
            return
        link.bytes_per_second = 1 << 30
        eventually(lambda: sender.lost or receiver.lost or boxes[1].frames, "the second message")
        assert sender.lost == receiver.lost == []
        sending.join(SECONDS)
        assert not sending.is_alive()


def test_the_end_of_the_generation_ends_the_wait_for_a_peer_that_reads_nothing(pair: list[Rank]) -> None:
    reading, chunk = threading.Event(), random_bytes(CHUNK_BYTES)
    pair[1].mailbox.deliver = lambda frame: reading.wait(SECONDS) and None  # type: ignore[method-assign]
    while pair[0].transport.send(1, Key(0, 0, 1), header_of(1 << 30), 0, chunk, lambda: None):
        pass
    closing = threading.Thread(target=pair[0].transport.close, args=(SECONDS,), daemon=True)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    pair[0].latch.trip(PeerLostError(1, "signal 9"))
    closing.join(SECONDS / 3)
    assert not closing.is_alive()
    reading.set()


def test_the_loss_of_a_peer_that_left_tells_of_its_stream_that_broke(pair: list[Rank]) -> None:
    pair[1].transport.incoming_ended(0, 2, "")
    pair[1].transport.incoming_ended(0, 0, "its stream broke")
    assert pair[1].lost == []
    for _ in range(2):
        pair[1].transport.probe(0, Key(0, 0, 1), "a()")
    assert pair[1].lost == [(0, "its stream broke")]


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_no_link_is_lost_once_the_generation_is_over(pair: list[Rank], how: str) -> None:
    if how == "closed":
        pair[1].transport.close(1.0)
    else:
        pair[1].latch.trip(GroupAbortedError(0, "over"))
    pair[1].transport.incoming_ended(0, 0, "its stream broke")
    assert pair[1].lost == []


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WorkerServer]]:
    """Servers whose waiting streams look for nothing by themselves."""
    monkeypatch.setattr(server_module, "_POLL_SECONDS", SECONDS)
    with two_servers(open_timeout_seconds=SECONDS) as made:
        send(Rank(0, made[0]).enter(assignment_of(0, made)), 1, Key(0, 0, 1), random_bytes(9))
        eventually(lambda: made[1]._changed._waiters, "a stream that waits")
        yield made


def test_a_stream_that_waits_is_taken_as_soon_as_its_generation_is_here(patient: list[WorkerServer]) -> None:
    box = Rank(1, patient[1]).enter(assignment_of(1, patient)).box(Key(0, 0, 1))
    eventually(lambda: box.frames, "the frame", seconds=SECONDS / 3)


def test_the_end_of_a_server_ends_the_wait_of_its_streams(patient: list[WorkerServer]) -> None:
    patient[1].close()
    eventually(lambda: not patient[1]._changed._waiters, "the end of the wait", seconds=SECONDS / 3)


def test_no_generation_is_entered_on_a_closed_server(servers: list[WorkerServer]) -> None:
    servers[0].close()
    with pytest.raises(GroupClosedError, match="server for peers is closed"):
        Rank(0, servers[0]).enter(assignment_of(0, servers))


def test_a_close_does_not_wait_for_streams_that_have_ended(pair: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "ANSWER_SECONDS", SECONDS)
    box = pair[1].box(Key(0, 0, 1))
    send(pair[0], 1, Key(0, 0, 1), random_bytes(9))
    eventually(lambda: box.frames, "the frame")
    closing = threading.Thread(target=pair[1].transport.close, args=(2 * SECONDS,), daemon=True)
    closing.start()
    closing.join(SECONDS / 3)
    assert not closing.is_alive()


def test_a_closed_server_says_nothing_of_streams_that_get_no_thread(
    servers: list[WorkerServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(body: object, name: str) -> None:
        raise LimitExceededError("Python starts no more threads")

    for server in servers:
        monkeypatch.setattr(server._threads, "_clock", SimpleNamespace(start=refused))
    servers[0].close()
    servers[0]._threads.submit(lambda: None)
    assert not caplog.records
    servers[1]._threads.submit(lambda: None)
    assert "a peer's stream is not read" in caplog.text
