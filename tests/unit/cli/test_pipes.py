"""The pipes that the launcher reads."""

import os

import pytest

from ferrorpc.cli.launcher.pipes import Pipes


@pytest.fixture
def pipe():
    """Both ends of a pipe, and the selector that nobody has told of it yet."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as out, open(writer, "wb", buffering=0) as into:
        pipes = Pipes()
        yield pipes, out, into
        pipes.close()


def test_who_writes_without_end_is_not_drained_without_end(pipe):
    pipes, out, into = pipe
    chunks = []

    def write_again(data, now):
        chunks.append(data)
        assert len(chunks) < 10_000
        into.write(b"more")

    pipes.listen(out, write_again)
    into.write(b"first")
    pipes.drain(out)
    assert chunks[:2] == [b"first", b"more"]


def test_what_is_finished_has_ended_whoever_could_still_write_and_ends_once(pipe):
    pipes, out, into = pipe
    chunks = []
    pipes.listen(out, lambda data, now: chunks.append(data))
    into.write(b"half a line")
    for _ in range(2):
        pipes.finish(out)
    into.write(b"too late")
    pipes.wait(0.0)
    assert chunks == [b"half a line", b""]


def test_a_wait_may_be_longer_than_the_system_call_allows(pipe):
    pipes, out, into = pipe
    chunks = []
    pipes.listen(out, lambda data, now: chunks.append(data))
    for seconds in (1e9, 1e300, float("inf")):
        into.write(b"x")
        pipes.wait(seconds)
    assert chunks == [b"x"] * 3
