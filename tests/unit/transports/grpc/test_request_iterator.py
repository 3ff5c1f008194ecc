"""Short frames are delivered on their way to the reader, everything else by the reader, and all of it in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrorpc.errors import FerroError
from ferrorpc.transports.grpc.incoming_stream import INTERCEPT_BYTES_MAX, IncomingStream
from ferrorpc.transports.grpc.request_iterator import RequestIterator
from ferrorpc.types import DType
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.frames import Frame, Header, Key, encode


class Owner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.at_once: list[int] = []
        self.failures: list[FerroError] = []
        self.ended: list[int] = []
        self.reading = False

    def frame_arrived(self, frame: Frame) -> None:
        self.numbers.append(frame.key.number)
        if not self.reading:
            self.at_once.append(frame.key.number)

    def probe_arrived(self, source: int, key: Key, signature: str) -> None:
        self.numbers.append(key.number)

    def probe_answered(self, source: int, answer: transport_pb2.ProbeAnswer) -> None:
        self.numbers.append(answer.number)

    def incoming_ended(self, source: int, streams: int, reason: str) -> None:
        self.ended.append(streams)

    def incoming_failed(self, source: int, error: FerroError) -> None:
        self.failures.append(error)


def frame(number: int, size: int) -> bytes:
    return encode(Key(0, 0, number), Header(0, "a()", DType.UINT8, (size,), size), 0, bytes(size))


def read(owner: Owner, messages: list[bytes]) -> None:
    """As gRPC does: each message passes through `deserialize` when the reader has asked for it."""
    requests = RequestIterator()

    def arriving() -> Iterator[object]:
        for message in messages:
            owner.reading = False
            passed = requests.deserialize(message)
            owner.reading = True
            yield passed

    IncomingStream(3, requests.attach(arriving()), owner).read()


def test_short_frames_come_on_the_way_and_all_in_order() -> None:
    owner = Owner()
    probe = transport_pb2.DataMessage(probe=transport_pb2.Probe(number=4)).SerializeToString()
    goodbye = transport_pb2.DataMessage(goodbye=transport_pb2.Goodbye(streams=2)).SerializeToString()
    read(owner, [frame(1, 10), frame(2, INTERCEPT_BYTES_MAX), frame(3, 10), probe, frame(5, 0), goodbye])
    assert owner.numbers == [1, 2, 3, 4, 5]
    assert owner.at_once == [1, 3, 5]
    assert (owner.ended, owner.failures) == ([2], [])


@pytest.mark.parametrize("damaged", [b"\x22\x03\x09\x09\x09", b"\x22"], ids=bytes.hex)
def test_what_is_no_frame_is_left_to_the_reader_to_fail_of(damaged: bytes) -> None:
    owner = Owner()
    read(owner, [frame(1, 10), damaged, frame(2, 10)])
    assert owner.numbers == [1]
    assert len(owner.failures) == 1
    assert owner.ended == []
