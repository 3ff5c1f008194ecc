"""Strangers at the HTTP port: those who ask for nothing, or never listen, leave room for those who do, and no traces."""

import asyncio
import contextlib
import http.client
import socket
import threading
from types import SimpleNamespace

import pytest

from tests.certificates import Issuer
from tests.integration.coordinator_process import coordinator
from tests.integration.test_status_http import Http
from tests.waiting import eventually

pytest.importorskip("starlette", reason="the status page needs the extra ui")
pytest.importorskip("uvicorn", reason="the status page needs the extra ui")

from ferrorpc_coordinator.state.access import Access
from ferrorpc_coordinator.web import connection_limits, server as http_server
from ferrorpc_coordinator.web.view import CoordinatorView

from ferrorpc.wire.identity import Role

MANY = 400
HALF_SOUND = b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n"
"""The head is right and is being answered when the rest turns out to be no request."""


def dialled(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def hung_up(connection):
    """Whether the other end has ended it."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connections_that_ask_for_nothing_or_never_finish_asking_keep_nobody_out():
    beginnings = (b"", b"GET", b"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"\x16\x03\x01\x02\x00\x01")
    with coordinator("--http-port", "0") as process, contextlib.ExitStack() as opened:
        silent = []
        for number in range(MANY):
            silent.append(opened.enter_context(dialled(process.http_address)))
            silent[-1].sendall(beginnings[number % len(beginnings)])
        status, _, body = Http(process.http_address).ask("/api/v1/jobs")
        assert (status, body) == (200, b"[]")
        for beginning in (b"\0" * 99, b"GET /" + b"x" * 1_000_000, b"G T / HTTP/1.1\r\n\r\n", HALF_SOUND) * 20:
            with dialled(process.http_address) as rude, contextlib.suppress(ConnectionError):
                rude.sendall(beginning)
                assert rude.recv(100).startswith(b"HTTP/1.1 400")
        assert sum(hung_up(one) for one in silent) >= MANY - connection_limits.IDLE_MAX
        assert len(process.stop()[1].splitlines()) < 10


def test_paths_out_of_the_page_and_pages_without_end_lead_nowhere():
    with coordinator("--http-port", "0") as process:
        port = Http(process.http_address)
        for path in ("/../page.py", "/static/../../server.py", "/..%2fserver.py", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"):
            assert port.ask(path)[0] == 404
        viewers = []
        for _ in range(100):
            viewer = http.client.HTTPConnection(process.http_address, timeout=10)
            viewer.request("GET", "/events")
            viewers.append((viewer, viewer.getresponse().status))
        assert {status for _, status in viewers} == {200, 503}
        assert port.ask("/api/v1/jobs")[0] == 200
        for viewer, _ in viewers:
            viewer.close()
        eventually(lambda: Http(process.http_address).events("/events", 1), "a place for another page")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connection_limits, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(connection_limits, "UNREAD_SECONDS", 0.5)


@pytest.fixture
def server(impatient):
    """uvicorn with this protocol and an answer that never ends, on a thread."""
    import uvicorn
    from starlette.responses import PlainTextResponse, StreamingResponse

    async def states():
        try:
            while True:
                yield bytes(1 << 16)
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def answer(scope, receive, send):
        await (StreamingResponse(states()) if scope["path"] == "/endless" else PlainTextResponse("done"))(scope, receive, send)

    ended = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        answer, http=connection_limits.LimitedHttpProtocol, log_config=None, log_level="critical", lifespan="off"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: running.run(sockets=[listening]), daemon=True)
    thread.start()
    yield SimpleNamespace(address="{}:{}".format(*listening.getsockname()), ended=ended)
    running.should_exit = True
    thread.join(10)


def test_a_connection_has_so_long_for_its_first_request_and_for_each_one_after(server):
    with dialled(server.address) as first, dialled(server.address) as second:
        second.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: b"done" in second.recv(1 << 16), "an answer")
        second.sendall(b"GET / HTTP/1.1\r\n")
        eventually(lambda: hung_up(first) and hung_up(second), "the end of both")


def test_who_does_not_get_on_with_the_tls_handshake_is_cut_off(monkeypatch, tmp_path):
    pytest.importorskip("cryptography")
    monkeypatch.setattr(http_server, "HANDSHAKE_SECONDS", 0.3)
    files = Issuer(tmp_path / "authority").issue(Role.COORDINATOR, "a")

    async def body():
        source = CoordinatorView(SimpleNamespace(jobs={}), None, lambda: True, Access(()), lambda: None)
        running = http_server.HttpServer.start(source, "127.0.0.1", 0, files)
        await asyncio.sleep(0.1)
        with dialled(f"127.0.0.1:{running.port}") as silent, dialled(f"127.0.0.1:{running.port}") as slow:
            slow.sendall(b"\x16\x03\x01\x02\x00\x01")
            await asyncio.to_thread(eventually, lambda: hung_up(silent) and hung_up(slow), "the end of both", 10)
        await running.stop()

    asyncio.run(body())


def test_who_never_reads_an_answer_is_cut_off(server):
    with dialled(server.address) as deaf:
        deaf.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert server.ended.wait(10)
