"""Timeouts of one HTTP connection: for its next request, and for an unread response; no others."""

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
    """A transport that discards what is written."""

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


def test_the_request_timeout_runs_only_while_no_request_is_complete():
    async def body():
        async with connected() as connection:
            assert connection.running() == [REQUEST_SECONDS]
            connection.protocol.data_received(REQUEST[:9])
            assert connection.running() == [REQUEST_SECONDS]
            connection.protocol.data_received(REQUEST[9:])
            assert connection.running() == []  # an event stream has no time limit
            await connection.answer()
            assert connection.running() == [REQUEST_SECONDS]

    asyncio.run(body())


def test_a_pipelined_request_starts_no_timeout():
    async def body():
        async with connected() as connection:
            connection.protocol.data_received(2 * REQUEST)
            await connection.answer()
            assert connection.running() == []
            await connection.answer()
            assert connection.running() == [REQUEST_SECONDS]

    asyncio.run(body())


def test_the_unread_timeout_ends_when_reading_goes_on():
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


def test_a_closed_connection_has_no_timeouts():
    async def body():
        async with connected() as connection:
            assert connection.protocol in LimitedHttpProtocol._waiting

    asyncio.run(body())
