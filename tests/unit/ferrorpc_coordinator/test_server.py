"""How a coordinator starts and stops, and what is said of one that does not come up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ferrorpc_coordinator import server
from ferrorpc_coordinator.state.access import Access
from ferrorpc_coordinator.state.settings import SECOND, Settings

from ferrorpc.errors import ConfigError
from ferrorpc.v1.journal_pb2 import EntryRow
from ferrorpc.wire.identity import Role
from ferrorpc.wire.tls import TlsFiles

OPTIONS = server.Options("127.0.0.1:0", Settings(), data_dir=Path("data"))


def test_an_error_while_recovering_is_reported_as_a_damaged_journal():
    with pytest.raises(ConfigError, match="the journal in data cannot be read"):
        server._recovered(OPTIONS, [("member", "job/a", b"")], Access(()))


def test_an_error_with_an_empty_journal_is_not_reported_as_damage(monkeypatch):
    def mint():
        raise OSError("no entropy")

    monkeypatch.setattr(server, "_mint", mint)
    with pytest.raises(OSError, match="no entropy"):
        server._recovered(OPTIONS, [], Access(()))


@pytest.mark.parametrize("reason", ["its folder is a file", "no room"])
def test_a_dispensable_journal_that_cannot_be_begun_is_done_without(tmp_path, monkeypatch, caplog, reason):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if reason == "no room":
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    else:
        (tmp_path / "folder").touch()
    directory = tmp_path / "folder" / "journal"
    assert server._open_journal(replace(OPTIONS, data_dir=directory, dispensable=True)) is None
    (line,) = caplog.messages
    assert line.startswith(f"no journal: {'the data directory ' * (reason != 'no room')}{directory} ")
    assert "; should the coordinator end, so does the job" in line
    assert not directory.exists()


@pytest.mark.parametrize("dispensable", [False, True])
def test_a_journal_that_was_begun_or_asked_for_is_not_done_without(tmp_path, dispensable):
    directory = tmp_path / "journal"
    if dispensable:
        directory.mkdir()
        (directory / "journal.sqlite").write_bytes(b"of a coordinator that ended")
    else:
        directory.touch()
    with pytest.raises(ConfigError):
        server._open_journal(replace(OPTIONS, data_dir=directory, dispensable=dispensable))
    assert directory.exists()


def test_recovered_rows_are_in_memory_once():
    """Otherwise a coordinator whose stores need most of its memory could not start again."""
    values = 16
    tracemalloc.start()
    try:
        rows = [("meta", "cluster_id", b"c"), ("meta", "revision", b"1")]
        rows += [("store", f"job/{n}", EntryRow(value=bytes(1 << 20), revision=1).SerializeToString()) for n in range(values)]
        tracemalloc.reset_peak()
        coordinator = server._recovered(OPTIONS, rows, Access(()))
        now, peak = (size >> 20 for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert coordinator.jobs["job"].store.keyspace.bytes >= values << 20
    assert now < values + 4
    assert peak < values + 4


def test_handlers_that_still_run_when_the_last_call_has_ended_are_waited_for(monkeypatch):
    """gRPC prints a traceback for each one that the end of the event loop cancels."""
    returned = []

    async def handle():
        await asyncio.sleep(0.05)
        returned.append("handler")

    class Server:
        def __init__(self, options):
            self.tasks = []

        def add_insecure_port(self, address):
            return 1

        def add_generic_rpc_handlers(self, handlers):
            pass

        def add_registered_method_handlers(self, service, handlers):
            pass

        async def start(self):
            pass

        async def stop(self, grace):
            self.tasks.append(asyncio.create_task(handle()))

    monkeypatch.setattr(server.grpc.aio, "server", Server)
    before = {number: signal.getsignal(number) for number in server._SIGNALS}
    try:
        asyncio.run(server.serve(replace(OPTIONS, data_dir=None), lambda announcement: signal.raise_signal(signal.SIGTERM)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert returned == ["handler"]


def test_a_name_is_refused_if_any_of_its_addresses_is_taken(monkeypatch):
    """gRPC would listen on the others, and of two coordinators each rank would find one or the other."""

    def both(host, port, **_):
        return [(socket.AF_INET6, 1, 6, "", ("::1", port, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", port))]

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", both)
        content = SimpleNamespace(add_insecure_port=lambda address: port)
        with pytest.raises(ConfigError, match=f"cannot listen on localhost:{port}: the port is in use"):
            server._bind(content, replace(OPTIONS, listen=f"localhost:{port}"))
    assert server._bind(content, replace(OPTIONS, listen=f"localhost:{port}")) == f"localhost:{port}"


MEMBERS_ONLY = TlsFiles("ca", "certificate", "key")
FOR_ANYONE = TlsFiles(None, "certificate", "key")


@pytest.mark.parametrize(
    ("listen", "tls", "grpcio", "told"),
    [
        ("0.0.0.0:0", None, "1.81.2", True),
        ("0.0.0.0:0", FOR_ANYONE, "1.81.2", True),
        ("0.0.0.0:0", MEMBERS_ONLY, "1.81.2", False),
        ("127.0.0.1:0", None, "1.81.2", False),
        ("0.0.0.0:0", None, "1.82.0", False),
    ],
)
def test_a_coordinator_that_strangers_can_flood_logs_a_warning(caplog, listen, tls, grpcio, told):
    server.warn_of_floods(replace(OPTIONS, listen=listen, tls=tls), grpcio)
    assert ["grpcio is 1.81.2; try: pip install 'grpcio>=1.82'" in one for one in caplog.messages] == [True] * told


def test_the_expiry_of_a_certificate_is_read_from_its_last_readable_file(tmp_path):
    pytest.importorskip("cryptography")
    from tests.certificates import DAY, Issuer

    issuer = Issuer(tmp_path)
    files = issuer.issue(Role.COORDINATOR, "a")
    certificate = server._Certificate(files)
    first = certificate.ends_at()
    issuer.issue(Role.COORDINATOR, "a", lifetime=2 * DAY)
    second = certificate.ends_at()
    assert 80_000 < second - first < 90_000
    Path(files.certificate).write_text("half a certif")
    assert certificate.ends_at() == second
    assert server._Certificate(None).ends_at() is None


def service(options=OPTIONS):
    access = Access(())
    return server._Service(options, server._recovered(options, [], access), access, None)


def test_the_gauges_tell_of_the_journal_and_of_the_certificate(tmp_path, monkeypatch):
    """Alerts are made of them (deploy/prometheus)."""
    pytest.importorskip("cryptography")
    from tests.certificates import Issuer

    options = replace(OPTIONS, tls=Issuer(tmp_path).issue(Role.COORDINATOR, "a"))
    monkeypatch.setattr(server.Driver, "refuses_writes", True)
    monkeypatch.setattr(server.Driver, "journal_waits_ns", 7 * SECOND)

    async def gauges():
        return service(options)._gauges()

    found = asyncio.run(gauges())
    assert found.journal_full
    assert found.journal_waits_ns == 7 * SECOND
    assert found.certificate_ends_at == options.tls.ends_at(listening=True)


def test_one_that_drains_is_not_healthy(monkeypatch):
    monkeypatch.setattr(server.HttpServer, "start", lambda view, *_: view)

    async def healthy():
        made = service(replace(OPTIONS, http_port=0))
        view = made._start_http()
        before = view.healthy()
        made._stopping.set()
        return before, view.healthy()

    assert asyncio.run(healthy()) == (True, False)


def test_the_kernel_ends_one_that_hangs_after_its_starter_has_died():
    async def seconds_left():
        readable, writable = os.pipe()
        os.close(writable)
        service()._starter_ended(readable)
        os.close(readable)
        return signal.setitimer(signal.ITIMER_REAL, 0)[0]

    assert server.LINGER_SECONDS < asyncio.run(seconds_left()) <= server.LINGER_SECONDS + server.STOP_SECONDS
