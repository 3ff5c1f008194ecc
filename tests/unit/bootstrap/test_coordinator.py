"""How long rank 0 waits for what its coordinator says."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ferrorpc.bootstrap import coordinator


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_the_first_line_is_read_and_no_more(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"listening 127.0.0.1:1\nmore")
    assert coordinator._first_line(reader) == b"listening 127.0.0.1:1\n"
    assert os.read(reader, 100) == b"more"


def test_one_that_never_ends_its_line_is_waited_for_no_longer_than_starting_takes(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "START_SECONDS", 0.1)
    reader, writer = pipe
    os.write(writer, b"listen")
    assert coordinator._first_line(reader) == b"listen"
