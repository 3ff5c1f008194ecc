"""The queue of one stream."""

import asyncio

import pytest
from ferrorpc_coordinator import send_queue
from ferrorpc_coordinator.send_queue import READ_PAUSE_BYTES, SendQueue


@pytest.mark.parametrize("turns", range(6))
def test_a_reader_that_is_cancelled_while_its_stream_ends_reads_no_more(turns):
    """The end of the stream wakes it, too. A read after the end would be an error of gRPC that nobody handles."""

    async def end() -> None:
        queue = SendQueue(1)
        queue.reserve(READ_PAUSE_BYTES + 1)
        reader = asyncio.create_task(queue.wait_for_room())
        await asyncio.sleep(0.01)
        queue.finish()
        for _ in range(turns):
            await asyncio.sleep(0)
        if reader.cancel():
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(end())


async def stuck(*_):
    await asyncio.Event().wait()


async def draining(queue, *writes):
    """The task that drains it, with these for its first writes; the next one gets stuck."""
    rest = iter(writes)
    task = asyncio.create_task(queue.drain(lambda *frame: next(rest, stuck)(*frame)))
    await asyncio.sleep(0.01)
    return task


async def done(*_):
    pass


def test_what_waits_behind_an_unread_frame_of_an_ended_stream_is_dropped_soon(monkeypatch):
    monkeypatch.setattr(send_queue, "END_SECONDS", 0.02)

    async def end() -> None:
        queue, left = SendQueue(1), []
        queue.left = left.append
        for size in (10, 200, 3000):
            queue.push(bytes(size))
        task = await draining(queue, done)
        assert not left  # the stream has not ended
        queue.finish()
        assert sum(left) == 3200
        await asyncio.sleep(0.1)
        assert sum(left) == 200
        assert not queue._frames
        task.cancel()
        await asyncio.wait([task])
        assert sum(left) == 0

    asyncio.run(end())


def test_a_stream_whose_call_has_ended_leaves_nothing_unread(monkeypatch):
    monkeypatch.setattr(send_queue, "END_SECONDS", 0.02)

    async def end() -> None:
        queue, left = SendQueue(1), []
        queue.left = left.append
        for _ in range(3):
            queue.push(b"frame")
        task = await draining(queue, done)
        queue.finish()
        task.cancel()
        await asyncio.sleep(0.1)
        assert left == [10, -10]

    asyncio.run(end())


def test_a_refusal_that_a_stranger_does_not_read_counts_against_no_job():
    async def end() -> None:
        queue, left = SendQueue(1), []
        queue.left = left.append
        queue.push(b"refused")
        queue.finish()
        task = await draining(queue)
        task.cancel()
        await asyncio.wait([task])
        assert not left

    asyncio.run(end())
