"""The coordinator's server: starts and stops journal, state, driver and gRPC server in order.

start: lock and read the journal -> recover the state -> bind the port -> first commit (epoch) -> serve -> announce
stop:  send Draining -> health NOT_SERVING -> pending rows become durable and answers are written -> streams end -> journal
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from ferrorpc.errors import AuthenticationError, ConfigError
from ferrorpc.wire import options as wire_options
from ferrorpc.wire.address import is_loopback, is_taken, join_address, split_address
from ferrorpc.wire.tls import TlsFiles
from ferrorpc_coordinator.driver import Driver
from ferrorpc_coordinator.health import Health
from ferrorpc_coordinator.journal import Journal, damaged
from ferrorpc_coordinator.metrics import Collector, Counters, Gauges
from ferrorpc_coordinator.servicers import SERVICE, CoordinatorServicer
from ferrorpc_coordinator.state.access import Access, Grant
from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.effects import Row
from ferrorpc_coordinator.state.settings import Settings
from ferrorpc_coordinator.tokens import TokenFile
from ferrorpc_coordinator.web.server import HttpServer
from ferrorpc_coordinator.web.view import CoordinatorView

DRAIN_SECONDS: Final = 1.0
"""How long streams may take to be written out and closed before they are cancelled."""
HANDLERS_SECONDS: Final = 1.0
"""How long the handlers of calls may take to return after the calls have ended."""
ALONE_SECONDS: Final = 1.0
"""Where it stops with its members: how long there may have been none that is known to live before."""
LINGER_SECONDS: Final = 5.0
"""After the death of the process that started this one: how long it runs on, to notice that and tell the other members."""
STOP_SECONDS: Final = 5.0
"""How long the end may take after that, before the kernel ends this process."""
ROOM_BYTES: Final = 16 << 20
"""Room without which a dispensable journal is not begun: more than its reserve for a full disk and a few rows."""
_POLL_SECONDS: Final = 0.1

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS: Final = (*_STOP_SIGNALS, signal.SIGUSR1)
_log = logging.getLogger("ferrorpc.coordinator")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one coordinator process."""

    listen: str
    """host:port; port 0 for a free one."""
    settings: Settings
    data_dir: Path | None = None
    dispensable: bool = False
    """Whether it serves without a journal where `data_dir` is not there yet, and none can be begun in it."""
    tls: TlsFiles | None = None
    """If it has an authority, every client needs a certificate of it."""
    grants: tuple[Grant, ...] = ()
    """The tokens that clients may use."""
    token_file: Path | None = None
    """The file with the tokens, which is watched for changes."""
    insecure: bool = False
    """Whether to allow listening beyond loopback without TLS."""
    http_port: int | None = None
    starter_fd: int | None = None
    """A pipe whose other end is the starter's. A byte in it: the starter exited normally; its end without one: it died."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where the coordinator can be reached, once it serves."""

    address: str
    cluster_id: str
    epoch: int
    http_address: str
    """Address of the status page; empty if there is none."""
    page: str
    """Its URL; empty likewise."""


def require_safe(options: Options) -> None:
    """Checks that not everyone on the network can reach an unprotected coordinator.

    Raises:
        ConfigError: they could.
    """
    if options.insecure or is_loopback(_host_of(options)):
        return
    if options.tls is not None:
        if options.tls.authority is None and not options.grants:
            raise ConfigError(
                f"listening on {options.listen} would let anyone who reaches this port join and read the job, if encrypted",
                hint="give FERRORPC_TLS_CA, so that clients need a certificate, or FERRORPC_TOKEN_FILE",
            )
        if options.http_port is not None and not options.grants:
            raise ConfigError(
                f"the status page on {_host_of(options)} would be for anyone who reaches it: browsers bring no certificate",
                hint="give FERRORPC_TOKEN_FILE (a line `observer TOKEN` will do), or leave out --http-port",
            )
        return
    raise ConfigError(
        f"listening on {options.listen} without TLS would let anyone who reaches this port join and read the job",
        hint="give FERRORPC_TLS_CERT and FERRORPC_TLS_KEY (`ferrorpc certs init`), or --insecure on a network you trust",
    )


def warn_of_floods(options: Options, grpcio_version: str) -> None:
    """Logs a warning if clients without a certificate reach a gRPC version whose memory they can fill."""
    members_only = options.tls is not None and options.tls.authority is not None
    if members_only or is_loopback(_host_of(options)) or wire_options.bounds_floods(grpcio_version):
        return
    _log.warning(
        "anyone who reaches %s can fill this process's memory with pings, because grpcio is %s; try: pip install 'grpcio>=%s'",
        options.listen,
        grpcio_version,
        ".".join(map(str, wire_options.FLOODS_BOUNDED_SINCE)),
    )


async def serve(options: Options, announce: Callable[[Announcement], None]) -> None:
    """Runs a coordinator until SIGTERM, SIGINT or SIGHUP, then drains it. The process ignores these signals afterwards.

    SIGUSR1 stops it as soon as all its members have left. The normal exit of the process at the other end of `starter_fd` stops
    it as soon as all that have a rank have left, and the death of that process after LINGER_SECONDS.

    Raises:
        ConfigError: it cannot start with these options.
    """
    require_safe(options)
    warn_of_floods(options, grpc.__version__)
    journal = _open_journal(options)
    options = replace(options, settings=replace(options.settings, durable=journal is not None))
    try:
        access = Access(options.grants)
        coordinator = _recovered(options, journal.rows() if journal is not None else [], access)
        await _Service(options, coordinator, access, journal).run(announce)
    finally:
        if journal is not None:
            journal.close()


def _open_journal(options: Options) -> Journal | None:
    """The journal; None where there is to be none, or where it is dispensable and cannot be begun."""
    directory = options.data_dir
    if directory is None:
        return None
    may_do_without = options.dispensable and not directory.exists()
    try:
        return Journal.open(directory, room_bytes=ROOM_BYTES if may_do_without else 0)
    except ConfigError as error:
        if not may_do_without:
            raise
        shutil.rmtree(directory, ignore_errors=True)  # else one started in its place would take this for a journal with rows
        told = "no journal: %s; should the coordinator end, so does the job (TMPDIR can name another disk)"
        _log.error(told, error.message)
        return None


class _Service:
    """The running parts of the coordinator."""

    def __init__(self, options: Options, coordinator: Coordinator, access: Access, journal: Journal | None) -> None:
        self._options = options
        self._access = access
        self._coordinator = coordinator
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._certificate = _Certificate(options.tls)
        self._counters = Counters()
        self._health = Health(("", SERVICE))
        self._server = grpc.aio.server(options=wire_options.control_server())
        self._address = _bind(self._server, options)
        self._driver = Driver(coordinator, journal, self._counters)
        servicer = CoordinatorServicer(self._driver, self._counters)
        self._server.add_generic_rpc_handlers((servicer.handler(), self._health.handler()))
        self._stopping = asyncio.Event()
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, announce: Callable[[Announcement], None]) -> None:
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                signal.signal(number, self._stop_soon)
        if self._options.starter_fd is not None:
            self._loop.add_reader(self._options.starter_fd, self._starter_ended, self._options.starter_fd)
        try:
            self._driver.tick()
            await self._first(self._driver.settled(), self._stopping.wait())
            if self._stopping.is_set():  # stopped while it waited for room on the journal's disk
                return
            await self._server.start()
            self._http = self._start_http()
            if self._options.token_file is not None:
                self._start(TokenFile(self._options.token_file, self._access).watch())
            http_address = join_address(_host_of(self._options), self._http.port) if self._http is not None else ""
            page = f"{'http' if self._options.tls is None else 'https'}://{http_address}" if http_address else ""
            announce(Announcement(self._address, self._coordinator.cluster_id, self._coordinator.epoch, http_address, page))
            await self._first(self._stopping.wait())
            await self._drain()
        finally:
            _ignore_signals()
            for task in self._tasks:
                task.cancel()
            if self._http is not None:
                await self._http.stop()
            self._driver.close()
            await self._server.stop(grace=DRAIN_SECONDS)
            await _other_tasks_ended()

    def _stop_soon(self, number: int, _frame: object) -> None:
        """Handles a signal: between two instructions of the event loop's thread."""
        at_once = number in _STOP_SIGNALS
        self._loop.call_soon_threadsafe(self._stopping.set if at_once else lambda: self._start(self._stop_when_alone()))

    def _starter_ended(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        if os.read(descriptor, 1):  # who has no rank is of a run that begins now, and joins the coordinator of that
            self._start(self._stop_when_alone(least_rank=0))
        else:
            signal.setitimer(signal.ITIMER_REAL, LINGER_SECONDS + STOP_SECONDS)
            self._loop.call_later(LINGER_SECONDS, self._stopping.set)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Starts a task that ends with this service."""
        self._tasks.append(self._loop.create_task(work))

    async def _stop_when_alone(self, least_rank: int = -1) -> None:
        """Stops as soon as no member has a rank of at least `least_rank`; those without one have -1."""
        alone_since = self._loop.time()
        while self._loop.time() < alone_since + ALONE_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            jobs = self._coordinator.jobs.values()
            if any(member.alive and member.rank >= least_rank and not member.spared for job in jobs for member in job.members):
                alone_since = self._loop.time()
        self._stopping.set()

    async def _first(self, *awaited: Coroutine[None, None, object]) -> None:
        """Waits until one of them is done, and cancels the others. Raises the driver's failure as soon as it fails."""
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one) for one in awaited]
        try:
            await asyncio.wait((*tasks, self._driver.failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if self._driver.failure.done():
            self._driver.failure.result()

    async def _drain(self) -> None:
        _log.info("draining %d sessions", self._driver.sessions)
        self._driver.drain(round(DRAIN_SECONDS * 1000))
        self._health.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._first(self._driver.settled())

    def _start_http(self) -> HttpServer | None:
        if self._options.http_port is None:
            return None
        collector = Collector(self._counters, self._gauges)
        view = CoordinatorView(
            self._coordinator, collector, lambda: not self._stopping.is_set(), self._access, self._driver.tick
        )
        return HttpServer.start(view, _host_of(self._options), self._options.http_port, self._options.tls)

    def _gauges(self) -> Gauges:
        journal = self._journal
        return Gauges(
            sessions=self._driver.sessions,
            journal_commits=0 if journal is None else journal.commits,
            journal_full=self._driver.refuses_writes,
            journal_waits_ns=self._driver.journal_waits_ns,
            certificate_ends_at=self._certificate.ends_at(),
            jobs=self._coordinator.jobs,
        )


def _ignore_signals() -> None:
    """Makes this process ignore signals from now on: it ends already, and another would end it with another exit code.

    asyncio's own handlers would not do: with its loop they end too, and the end of the interpreter and of gRPC takes a while.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


async def _other_tasks_ended() -> None:
    """Waits for the handlers of ended calls. gRPC prints a traceback for one that the end of the event loop cancels."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=HANDLERS_SECONDS)


class _Certificate:
    """When the coordinator's certificate expires, by its file, or by the last version of the file that could be read."""

    def __init__(self, files: TlsFiles | None) -> None:
        self._files = files
        self._stamps: object = None
        self._ends_at: float | None = None

    def ends_at(self) -> float | None:
        """In seconds since the epoch. An unchanged file is not read again, since each scrape takes time on the event loop."""
        if self._files is not None:
            with contextlib.suppress(ConfigError, AuthenticationError):
                stamps = self._files.stamps()
                if stamps != self._stamps:
                    self._ends_at, self._stamps = self._files.ends_at(listening=True), stamps
        return self._ends_at


def _recovered(options: Options, rows: list[Row], access: Access) -> Coordinator:
    """The state, recovered from the journal's rows.

    Empties `rows`, so that values are not in memory twice. An error here would recur at every start, so it is reported as a
    damaged journal.
    """
    known = bool(rows)
    rows.reverse()

    def taken() -> Iterator[Row]:
        while rows:
            yield rows.pop()

    try:
        return Coordinator(options.settings, taken(), access=access, mint=_mint, now_ns=time.monotonic_ns())
    except Exception as error:
        if options.data_dir is None or not known:
            raise
        _log.debug("recovery failed", exc_info=True)
        raise damaged(options.data_dir, f"{type(error).__name__}: {error}") from None


def _bind(server: grpc.aio.Server, options: Options) -> str:
    listen, tls, port = options.listen, options.tls, 0
    if not is_taken(*split_address(listen)):  # of a name gRPC would be content with the addresses that are free
        with contextlib.suppress(RuntimeError):
            port = server.add_insecure_port(listen) if tls is None else server.add_secure_port(listen, tls.server_credentials())
    if not port:
        why = "the port is in use, or the host is not an address of this machine"
        why += "" if tls is None else f", or gRPC does not take the certificate {tls.certificate}"
        hint = "stop what uses it (perhaps another coordinator), or give another --listen"
        raise ConfigError(f"cannot listen on {listen}: {why}", hint=hint)
    return join_address(_host_of(options), port)


def _host_of(options: Options) -> str:
    return split_address(options.listen)[0]


def _mint() -> str:
    return secrets.token_hex(16)
