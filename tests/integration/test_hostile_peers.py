"""Strangers and liars at a worker's port while its ranks exchange messages: they get nowhere, and cost little."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from ferrorpc.errors import AuthenticationError, CodecError, PermissionDeniedError
from ferrorpc.transports.control import CONTROL_MAX
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc import server as server_module
from ferrorpc.transports.grpc.pending_streams import PENDING_MAX
from ferrorpc.transports.grpc.server import METHOD, WorkerServer
from ferrorpc.v1 import tensor_pb2, transport_pb2
from ferrorpc.wire import options
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.frames import Key
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION
from ferrorpc.wire.refusal_log import LOGGED_MAX
from tests.integration.lane_ranks import SECONDS, Rank, assignment_of, pair_of, random_bytes, send, two_servers
from tests.waiting import eventually

KEY = Key(0, 0, 1)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture
def servers() -> Iterator[list[WorkerServer]]:
    with two_servers(open_timeout_seconds=3.0) as made:
        yield made


@pytest.fixture
def pair(servers: list[WorkerServer]) -> list[Rank]:
    return pair_of(servers)


def opening(**changes: object) -> bytes:
    """That of rank 0 to rank 1, but for what is changed."""
    fields = {"protocol_version": DATA_PROTOCOL_VERSION, "job": "j", "cluster_id": "c", "generation": 1, "source_rank": 0}
    said = transport_pb2.Open(**fields | {"target_rank": 1, "token": "secret"} | changes)
    return transport_pb2.DataMessage(open=said).SerializeToString()


def frame(**changes: object) -> bytes:
    fields = {"number": 1, "total": 4, "signature": "a()", "dtype": 6, "shape": [4], "payload": b"abcd"}
    return transport_pb2.DataMessage(frame=tensor_pb2.TensorFrame(**fields | changes)).SerializeToString()


def converse(server: WorkerServer, messages: list[bytes]) -> list[transport_pb2.ControlMessage]:
    """A stream with these messages on a connection of its own, and what comes back."""
    with grpc.insecure_channel(server.address, options=options.data_channel()) as channel:
        answers = channel.stream_stream(METHOD)(iter(messages), timeout=SECONDS)
        return [transport_pb2.ControlMessage.FromString(answer) for answer in answers]


def exchange(pair: list[Rank]) -> None:
    """A message each way arrives whole."""
    boxes = [rank.box(KEY) for rank in pair]
    for rank in pair:
        send(rank, 1 - rank.rank, KEY, random_bytes(3 * CHUNK_BYTES))
    for rank, box in zip(pair, boxes, strict=True):
        place = (1 - rank.rank, 0)
        eventually(lambda box=box, place=place: len(box.frames.get(place, ())) == 3, "the whole message")
    assert [rank.failures + rank.lost for rank in pair] == [[], []]


def test_refusals_are_told_in_short_lines_and_not_all_of_them(
    pair: list[Rank], servers: list[WorkerServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    strange = [opening(job="x\n" * 1_000_000), opening(token="guess")] + [opening(source_rank=7)] * (2 * LOGGED_MAX)
    refused = [restore(converse(servers[1], [message])[0].refused) for message in strange]
    assert {type(error) for error in refused} == {AuthenticationError, PermissionDeniedError}
    assert max(len(error.message) for error in refused) < 500
    lines = [record.getMessage() for record in caplog.records if record.name == "ferrorpc.transports"]
    assert len(lines) == LOGGED_MAX
    assert all(len(line) < 500 and "\n" not in line and "secret" not in line and "guess" not in line for line in lines)
    exchange(pair)


def test_silent_connections_and_half_a_handshake_hold_nobody_up(pair: list[Rank], servers: list[WorkerServer]) -> None:
    host, _, port = servers[1].address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(300)]
    for number, one in enumerate(silent[:200]):
        one.sendall(PREFACE[: number % len(PREFACE)] if number % 2 else PREFACE + bytes([0, 0, 9, 4, 0, 0, 0, 0, number]) * 9)
    exchange(pair)
    for one in silent:
        one.close()


def incoming_threads() -> int:
    return sum(one.name.startswith("ferrorpc-incoming") for one in threading.enumerate())


def test_streams_that_never_say_whose_they_are_make_room_for_those_that_do() -> None:
    """Each would have a thread of this process for as long as its patience lasts."""
    threads, release = threading.active_count(), threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(2 * SECONDS)
        yield from ()

    with two_servers(open_timeout_seconds=2 * SECONDS) as servers:
        address = servers[1].address
        channels = [grpc.insecure_channel(address, options=options.data_channel()) for _ in range(PENDING_MAX // 12)]
        calls = [channel.stream_stream(METHOD)(nothing()) for channel in channels for _ in range(16)]
        too_many = len(calls) - PENDING_MAX
        assert too_many > 16
        eventually(lambda: sum(call.done() for call in calls) >= too_many, "those that have waited longest end")
        eventually(lambda: incoming_threads() <= PENDING_MAX + 8, "their threads end")
        exchange(pair_of(servers))
        assert not all(call.done() for call in calls), "the others go on waiting"
        release.set()
        for channel in channels:
            channel.close()
        eventually(lambda: threading.active_count() <= threads + 20, "the threads end")


def test_a_stream_that_never_says_whose_it_is_ends_when_the_patience_is_over(servers: list[WorkerServer]) -> None:
    release = threading.Event()
    with grpc.insecure_channel(servers[1].address, options=options.data_channel()) as channel:
        call = channel.stream_stream(METHOD)(iter(release.wait, True), timeout=SECONDS)
        ended_with = call.code()
        release.set()
        assert ended_with is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    "strange",
    [
        frame(shape=[1] * 33),
        frame(shape=[2**64 - 1]),
        frame(dtype=99),
        frame(payload=b"abcde"),
        b"\x22\x05abc",
        opening(lane=3),
    ],
    ids=["dimensions", "negative", "dtype", "longer", "cut", "open-again"],
)
def test_what_cannot_be_ends_the_generation_and_names_who_sent_it(
    pair: list[Rank], servers: list[WorkerServer], strange: bytes
) -> None:
    answers = converse(servers[1], [opening(lane=3), strange])
    assert answers[0].HasField("opened")
    told = restore(answers[1].refused)
    eventually(lambda: pair[1].failures, "the error")
    (error,) = pair[1].failures
    assert isinstance(error, CodecError)
    assert isinstance(told, CodecError)
    assert "rank 0" in error.message


def test_who_asks_and_never_listens_is_cut_off(servers: list[WorkerServer]) -> None:
    """Its answers would pile up for as long as it asks."""
    ranks = [Rank(rank, servers[rank]).enter(assignment_of(rank, servers)) for rank in range(2)]
    probe = transport_pb2.DataMessage(probe=transport_pb2.Probe(number=1, signature="s" * 300)).SerializeToString()

    def questions() -> Iterator[bytes]:
        yield opening()
        while not ranks[1].failures:
            yield probe

    with grpc.insecure_channel(servers[1].address, options=options.data_channel()) as channel:
        call = channel.stream_stream(METHOD)(questions())
        ranks[1].box(Key(0, 0, 1), "t" * 3000)
        eventually(lambda: ranks[1].failures, "the error", seconds=30)
        call.cancel()
    assert f"{CONTROL_MAX}" in ranks[1].failures[0].message
    assert "rank 0" in ranks[1].failures[0].message


@contextlib.contextmanager
def stream_of_rank_0(server: WorkerServer, *messages: bytes) -> Iterator[grpc.Call]:
    """A stream that was taken, says these messages after its Open, and then nothing until it is left."""
    release = threading.Event()

    def said() -> Iterator[bytes]:
        yield from (opening(), *messages)
        release.wait(SECONDS)

    with grpc.insecure_channel(server.address, options=options.data_channel()) as channel:
        stream = channel.stream_stream(METHOD)(said())
        assert transport_pb2.ControlMessage.FromString(next(stream)).HasField("opened")
        yield stream
        release.set()
        stream.cancel()


def test_a_rank_that_somebody_else_speaks_for_is_told_so(pair: list[Rank], servers: list[WorkerServer]) -> None:
    """Whoever spoke first is heard; the second one's generation ends with a reason."""
    probe = transport_pb2.DataMessage(probe=transport_pb2.Probe(number=7, signature="a()"))
    with stream_of_rank_0(servers[1], probe.SerializeToString()) as stream:
        assert transport_pb2.ControlMessage.FromString(next(stream)).HasField("probe_answer")
        send(pair[0], 1, KEY, random_bytes(10))
        eventually(lambda: pair[0].failures, "the refusal")
    (error,) = pair[0].failures
    assert isinstance(error, PermissionDeniedError)
    assert "rank 0 dialled rank 1 twice in one generation" in error.message
    assert "somebody else" in error.hint


def test_a_dial_that_is_repeated_takes_the_place_of_a_stream_that_said_nothing(
    pair: list[Rank], servers: list[WorkerServer]
) -> None:
    """Who dials does not know whether an Open arrived before the connection broke, of which the receiver may not know yet."""
    with stream_of_rank_0(servers[1]) as first:
        exchange(pair)
        assert list(first) == [], "it is ended without a word"
    assert [rank.failures + rank.lost for rank in pair] == [[], []]


def test_a_stream_that_breaks_before_it_said_anything_is_no_lost_link(pair: list[Rank], servers: list[WorkerServer]) -> None:
    with stream_of_rank_0(servers[1]) as first:
        first.cancel()
        eventually(lambda: not pair[1].transport._links[0].incoming, "the end of the stream")
        exchange(pair)
    assert [rank.failures + rank.lost for rank in pair] == [[], []]


def test_a_second_stream_is_over_once_it_is_refused_and_the_first_goes_on(
    pair: list[Rank], servers: list[WorkerServer]
) -> None:
    exchange(pair)
    release = threading.Event()

    def said() -> Iterator[bytes]:
        yield opening()
        release.wait(SECONDS)

    with grpc.insecure_channel(servers[1].address, options=options.data_channel()) as channel:
        try:
            answers = list(channel.stream_stream(METHOD)(said(), timeout=SECONDS))
        finally:
            release.set()
    (answer,) = map(transport_pb2.ControlMessage.FromString, answers)
    assert answer.HasField("refused")
    later = pair[1].box(Key(0, 0, 9))
    send(pair[0], 1, Key(0, 0, 9), random_bytes(10))
    eventually(lambda: later.frames, "the next frame of the first stream")
    assert [rank.lost for rank in pair] == [[], []]


def test_a_stream_whose_caller_has_gone_waits_for_no_generation() -> None:
    release = threading.Event()

    def said() -> Iterator[bytes]:
        yield opening()
        release.wait(SECONDS)

    with two_servers(open_timeout_seconds=SECONDS) as servers:
        with grpc.insecure_channel(servers[1].address, options=options.data_channel()) as channel:
            call = channel.stream_stream(METHOD)(said())
            eventually(lambda: servers[1]._changed._waiters, "a stream that waits")
            release.set()
            call.cancel()
        eventually(lambda: not servers[1]._changed._waiters, "the end of the wait", seconds=SECONDS / 3)


def test_there_are_only_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STREAMS_MAX", 2)
    release = threading.Event()
    with (
        two_servers(open_timeout_seconds=SECONDS) as servers,
        grpc.insecure_channel(servers[1].address, options=options.data_channel()) as channel,
    ):
        calls = [channel.stream_stream(METHOD)(iter(lambda: not release.wait(SECONDS), False)) for _ in range(2)]
        eventually(lambda: len(servers[1]._pending._waiting) == 2, "the streams")
        with pytest.raises(grpc.RpcError) as raised:
            list(channel.stream_stream(METHOD)(iter([opening()]), timeout=10))
        release.set()
        for call in calls:
            call.cancel()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
