"""The queue of one stream."""

import asyncio

import pytest
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
