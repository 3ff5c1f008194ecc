"""What a peer may send in place of a message: none of it does more than end the generation with a CodecError."""

import random
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from ferrorpc.errors import CodecError, FerroError, LimitExceededError, PeerLostError
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.grpc.incoming_stream import IncomingStream, read_message, refusal
from ferrorpc.transports.grpc.lane import Lane
from ferrorpc.transports.grpc.request_iterator import RequestIterator
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import Assignment, DType, Peer
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.frames import Frame, Header, Key, encode
from ferrorpc.wire.parse import parse
from tests.unit.wire.test_frames import mutate


class NoServer:
    """Takes the place of the worker's server where no stream is dialled."""

    token = "secret"

    def register(self, handler: GrpcTransport, close_lanes: object) -> None:
        self.handler = handler


def transport_of(failures: list[FerroError], lost: list[int]) -> GrpcTransport:
    peers = tuple(Peer(rank, f"m{rank}") for rank in range(3))
    assignment = Assignment("j", "c", 1, 1, peers)
    mailbox = Mailbox(1, failures.append)
    return GrpcTransport(
        NoServer(),  # type: ignore[arg-type]
        assignment,
        mailbox,
        Latch(),
        SYSTEM_CLOCK,
        lambda peer, reason: lost.append(peer),
    )


def test_beats_do_not_wait_until_the_tokens_file_is_read() -> None:
    """It may lie where reading hangs, and they tell of the traffic of each peer."""
    transport, seen = transport_of([], []), list[object]()
    with ThreadPoolExecutor(1) as pool:

        def both() -> tuple[str, str]:
            seen.append(pool.submit(transport.traffic).result(10.0))
            raise CodecError("no stream is dialled here")

        transport._server.token = SimpleNamespace(both=both)  # type: ignore[assignment]
        with pytest.raises(CodecError):
            transport._new_lane_to(0, 0, needed=True)
        transport._links[0].loss = "gone"
        assert transport._new_lane_to(0, 0, needed=False) is None
    assert seen == [{}], "and it is not read where nothing is dialled"


FRAME = encode(Key(0, 0, 1), Header(0, "a()", DType.FLOAT32, (3,), 12), 0, bytes(12))
DATA_MESSAGES = [
    FRAME,
    transport_pb2.DataMessage(probe=transport_pb2.Probe(group=1, stream=2, number=3, signature="a()")).SerializeToString(),
    transport_pb2.DataMessage(goodbye=transport_pb2.Goodbye()).SerializeToString(),
    transport_pb2.DataMessage(open=transport_pb2.Open(job="j", token="t", generation=4)).SerializeToString(),
]
CONTROL_MESSAGES: list[Message] = [
    transport_pb2.ControlMessage(opened=transport_pb2.Opened(generation=1)),
    transport_pb2.ControlMessage(grant=transport_pb2.Grant(group=1, stream=2, number=3, slot=4)),
    transport_pb2.ControlMessage(probe_answer=transport_pb2.ProbeAnswer(number=3, standing=2, signature="b()", last_number=9)),  # type: ignore[arg-type]
    transport_pb2.ControlMessage(goodbye=transport_pb2.Goodbye()),
    transport_pb2.ControlMessage.FromString(refusal(PeerLostError(2, "signal 9"))),
]


def test_fifty_thousand_damaged_data_messages_end_a_stream_at_worst() -> None:
    chance = random.Random(4)
    tracemalloc.start()
    try:
        kinds = set()
        for _ in range(50_000):
            data = mutate(chance, chance.choice(DATA_MESSAGES))
            try:
                kinds.add(type(read_message(data, 0)))
            except CodecError:
                kinds.add(CodecError)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert kinds == {Frame, transport_pb2.DataMessage, CodecError}


def test_an_incoming_stream_that_reads_damaged_messages_reports_codec_errors_and_nothing_else() -> None:
    chance = random.Random(5)
    seen = set()
    for _ in range(3_000):
        failures: list[FerroError] = []
        lost: list[int] = []
        transport = transport_of(failures, lost)
        sent = iter([chance.choice(DATA_MESSAGES[:2]), mutate(chance, chance.choice(DATA_MESSAGES))])
        IncomingStream(0, RequestIterator().attach(sent), transport).read()
        assert len(failures) + len(lost) <= 1
        seen.update(type(failure) for failure in failures)
        seen.update("lost" for _ in lost)
    assert seen == {CodecError, "lost"}


def test_fifty_thousand_damaged_control_messages_do_no_harm() -> None:
    chance = random.Random(6)
    failures: list[FerroError] = []
    lost: list[int] = []
    transport = transport_of(failures, lost)
    box = transport.mailbox.enter(Key(1, 2, 3), "a()", lambda: None)
    samples = [message.SerializeToString() for message in CONTROL_MESSAGES]
    lanes: list[Any] = [SimpleNamespace(peer=peer, sent_frames=True, opened=False) for peer in (0, 2)]
    parsed = 0
    for _ in range(50_000):
        try:
            message = parse(transport_pb2.ControlMessage, mutate(chance, chance.choice(samples)), "no message")
        except CodecError:
            continue
        parsed += 1
        transport.lane_answered(chance.choice(lanes), message)
    assert parsed > 1_000
    assert all(isinstance(failure, FerroError) for failure in failures)
    assert set(lost) <= {0, 2}
    assert len(lost) <= 2
    assert set(box.answers) <= {0, 2}


def test_a_message_for_which_there_is_no_memory_ends_the_generation_and_says_why() -> None:
    def too_large() -> Iterator[bytes]:
        yield FRAME
        raise MemoryError("16 GiB")

    failures: list[FerroError] = []
    stream = IncomingStream(0, RequestIterator().attach(too_large()), transport_of(failures, []))
    stream.read()
    (failure,) = failures
    assert isinstance(failure, LimitExceededError)
    assert "no memory for what rank 0 sends: 16 GiB" in failure.message
    (answer,) = stream.queue.messages()
    assert restore(transport_pb2.ControlMessage.FromString(answer).refused).message == failure.message


def test_a_lane_whose_thread_fails_ends_and_is_reported() -> None:
    """A bug must not leave the operations that send on it to their deadlines."""
    ended: list[str] = []
    owner = SimpleNamespace(lane_ended=lambda lane, reason: ended.append(reason))
    channel = SimpleNamespace(stream_stream=lambda method: 1 / 0, close=lambda: ended.append("closed"))
    threads: list[Callable[[], None]] = []
    clock = SimpleNamespace(start=lambda body, name: threads.append(body), now=SYSTEM_CLOCK.now)
    arguments: Any = (lambda: channel, b"", lambda: None, owner, clock)
    lane = Lane(1, 0, "nowhere:1", *arguments, dial_seconds=1.0)
    with pytest.raises(ZeroDivisionError):
        threads[0]()
    assert ended == ["closed", "the thread of its lane failed"]
    lane.wait(0.0)
    assert list(lane.queue.messages()) == []


def test_a_message_of_a_newer_version_is_passed_over() -> None:
    failures: list[FerroError] = []
    lost: list[int] = []
    transport = transport_of(failures, lost)
    sent = iter([b"\xaa\x06\x03new", b"", DATA_MESSAGES[2]])
    IncomingStream(0, RequestIterator().attach(sent), transport).read()
    assert failures == lost == []


def test_a_frame_behind_an_unknown_field_is_a_frame() -> None:
    message = read_message(b"\xaa\x06\x03new" + FRAME, 0)
    assert isinstance(message, Frame)
    assert message.key == Key(0, 0, 1)


def test_an_answer_that_cannot_be_ends_the_generation() -> None:
    failures: list[FerroError] = []
    transport = transport_of(failures, [])
    lane: Any = SimpleNamespace(peer=2, sent_frames=True, opened=True)
    answer = transport_pb2.ProbeAnswer(standing=77)  # type: ignore[arg-type]
    transport.lane_answered(lane, transport_pb2.ControlMessage(probe_answer=answer))
    assert [type(each) for each in failures] == [CodecError]


def test_a_peer_that_left_before_it_was_asked_is_not_lost() -> None:
    lost: list[int] = []
    transport = transport_of([], lost)
    for peer, sent_frames in ((0, False), (2, True)):
        lane: Any = SimpleNamespace(peer=peer, sent_frames=sent_frames, opened=False)
        transport.lane_answered(lane, transport_pb2.ControlMessage(goodbye=transport_pb2.Goodbye()))
    assert lost == [2]


def test_the_loss_of_a_peer_that_left_tells_of_its_stream_that_broke_at_once() -> None:
    def broken() -> Iterator[bytes]:
        raise grpc.RpcError
        yield b""

    reasons: list[str] = []
    transport = transport_of([], [])
    transport._on_link_lost = lambda peer, reason: reasons.append(reason)
    IncomingStream(0, RequestIterator().attach(broken()), transport).read()
    lane: Any = SimpleNamespace(peer=0, sent_frames=True, opened=False)
    transport.lane_answered(lane, transport_pb2.ControlMessage(goodbye=transport_pb2.Goodbye()))
    assert reasons == ["its stream broke"]
