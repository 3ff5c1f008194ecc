"""Chunks that come over several streams are taken in the order of their offsets."""

import itertools

from ferrorpc.transports.chunks import Chunks
from ferrorpc.types import DType
from ferrorpc.wire.frames import Frame, Header, Key

HEADER = Header(0, "a()", DType.UINT8, (8,), 8)


def frame(offset: int, size: int = 2) -> Frame:
    return Frame(Key(0, 0, 1), 0, HEADER, offset, memoryview(bytes(size)))


def offsets(chunks: Chunks) -> list[int]:
    return [chunk.offset for chunk in chunks]


def test_in_whatever_order_they_come_they_are_there_once_all_before_them_are() -> None:
    for order in itertools.permutations((0, 2, 4, 6)):
        chunks, came = Chunks(HEADER), set[int]()
        for offset in order:
            chunks.put(frame(offset))
            came.add(offset)
            assert offsets(chunks) == list(itertools.takewhile(came.__contains__, (0, 2, 4, 6)))


def test_what_was_taken_is_not_waited_for_again() -> None:
    chunks = Chunks(HEADER)
    chunks.put(frame(0))
    assert chunks.popleft().offset == 0
    chunks.put(frame(4))
    assert offsets(chunks) == []
    chunks.put(frame(2))
    assert offsets(chunks) == [2, 4]


def test_one_that_came_before_is_left_for_its_taker_to_complain_of() -> None:
    chunks = Chunks(HEADER)
    for offset in (0, 2, 0):
        chunks.put(frame(offset))
    assert offsets(chunks) == [0, 2, 0]
