"""Chunks that come over several streams are taken in the order of their offsets."""

import itertools

import pytest

from ferrorpc.errors import CodecError
from ferrorpc.transports.reassembly import ReassemblyQueue
from ferrorpc.types import DType
from ferrorpc.wire.frames import Frame, Header, Key

HEADER = Header(0, "a()", DType.UINT8, (8,), 8)


def frame(offset: int, size: int = 2, header: Header = HEADER) -> Frame:
    return Frame(Key(0, 0, 1), 0, header, offset, memoryview(bytes(size)))


def offsets(chunks: ReassemblyQueue) -> list[int]:
    return [chunk.offset for chunk in chunks]


def test_in_whatever_order_they_come_they_are_there_once_all_before_them_are() -> None:
    for order in itertools.permutations((0, 2, 4, 6)):
        chunks, came = ReassemblyQueue(HEADER), set[int]()
        for offset in order:
            chunks.put(frame(offset))
            came.add(offset)
            assert offsets(chunks) == list(itertools.takewhile(came.__contains__, (0, 2, 4, 6)))


def test_what_was_taken_is_not_waited_for_again() -> None:
    chunks = ReassemblyQueue(HEADER)
    chunks.put(frame(0))
    assert chunks.popleft().offset == 0
    chunks.put(frame(4))
    assert offsets(chunks) == []
    chunks.put(frame(2))
    assert offsets(chunks) == [2, 4]


@pytest.mark.parametrize(
    ("total", "chunks"),
    [
        (8, [(0, 2), (2, 2), (0, 2)]),
        (8, [(4, 2), (4, 2)]),
        (8, [(0, 4), (2, 4)]),
        (8, [(1, 7), (2, 6)]),
        (16, [(0, 4), (8, 8), (12, 4)]),
        (0, [(0, 0), (0, 0)]),
    ],
    ids=["taken-up", "early", "overlapping", "early-overlapping", "within an early one", "empty"],
)
def test_no_byte_comes_twice(total: int, chunks: list[tuple[int, int]]) -> None:
    """What waits for a call would otherwise grow for as long as somebody repeats itself."""
    waiting = ReassemblyQueue(Header(0, "a()", DType.UINT8, (total,), total))
    *sound, repeated = (frame(offset, size, waiting.header) for offset, size in chunks)
    for chunk in sound:
        waiting.put(chunk)
    with pytest.raises(CodecError, match=f"rank 0 sent byte {repeated.offset} of a message of {total} bytes twice"):
        waiting.put(repeated)
