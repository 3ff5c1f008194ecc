"""Which clocks run against one HTTP connection: one for its next request, one for what it leaves unread, and none besides."""

import asyncio
import contextlib

import pytest

pytest.importorskip("uvicorn", reason="the status page needs the extra ui")

import uvicorn
from ferrorpc_coordinator.web.connection_limits import REQUEST_SECONDS, UNREAD_SECONDS, LimitedHttpProtocol
from uvicorn.server import ServerState

KEEP_ALIVE = 600
"""uvicorn's own timer, which is none of these."""
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that keeps nothing."""

    closing = False

    def write(self, data):
        pass

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    abort = close

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Connection:
    """One connection whose requests are answered when the test says so."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.answers = asyncio.Semaphore(0)
        self.timers = []
        config = uvicorn.Config(self._answer, interface="asgi3", lifespan="off", log_config=None, timeout_keep_alive=KEEP_ALIVE)
        self.protocol = LimitedHttpProtocol(config, ServerState(), {}, self)
        self.wire = Wire()
        self.protocol.connection_made(self.wire)

    def call_later(self, seconds, callback):
        self.timers.append((seconds, self.loop.call_later(seconds, callback)))
        return self.timers[-1][1]

    def create_task(self, coroutine, **options):
        return self.loop.create_task(coroutine, **options)

    async def _answer(self, scope, receive, send):
        await self.answers.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def answer(self):
        self.answers.release()
        for _ in range(6):
            await asyncio.sleep(0)

    def running(self):
        return [seconds for seconds, timer in self.timers if not timer.cancelled() and seconds != KEEP_ALIVE]


@contextlib.asynccontextmanager
async def connected():
    connection = Connection()
    try:
        yield connection
    finally:
        connection.wire.close()
        if connection.protocol in connection.protocol.connections:
            connection.protocol.connection_lost(None)
        connection.answers.release()
        assert connection.running() == []
        assert connection.protocol not in LimitedHttpProtocol._waiting


def test_a_connection_is_waited_for_only_while_it_owes_a_request():
    async def body():
        async with connected() as connection:
            assert connection.running() == [REQUEST_SECONDS]
            connection.protocol.data_received(REQUEST[:9])
            assert connection.running() == [REQUEST_SECONDS]
            connection.protocol.data_received(REQUEST[9:])
            assert connection.running() == []  # a stream of states may go on for ever
            await connection.answer()
            assert connection.running() == [REQUEST_SECONDS]

    asyncio.run(body())


def test_a_request_that_came_with_the_one_before_it_is_not_waited_for():
    async def body():
        async with connected() as connection:
            connection.protocol.data_received(2 * REQUEST)
            await connection.answer()
            assert connection.running() == []
            await connection.answer()
            assert connection.running() == [REQUEST_SECONDS]

    asyncio.run(body())


def test_who_reads_on_after_a_pause_is_not_cut_off_for_it():
    async def body():
        async with connected() as connection:
            connection.protocol.data_received(REQUEST)
            for _ in range(2):
                connection.protocol.pause_writing()
                assert connection.running() == [UNREAD_SECONDS]
                connection.protocol.resume_writing()
                assert connection.running() == []
            connection.protocol.pause_writing()

    asyncio.run(body())


def test_a_connection_that_ends_unasked_is_not_waited_for_any_more():
    async def body():
        async with connected() as connection:
            assert connection.protocol in LimitedHttpProtocol._waiting

    asyncio.run(body())
