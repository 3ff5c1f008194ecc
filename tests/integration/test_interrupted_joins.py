"""Ctrl-C within init_process_group(): wherever it comes, the others hear of it, and the process can join again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import socket

import pytest

import ferrorpc
from ferrorpc import LimitExceededError, PeerLostError
from ferrorpc.coordination.base import Membership
from ferrorpc.coordination.session import RemoteSession
from ferrorpc.transports.grpc.server import WorkerServer
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join
from tests.interrupts import was_struck
from tests.threads import SECONDS
from tests.waiting import eventually

FILES = ("ferrorpc/bootstrap/process_group.py", "ferrorpc/coordination/session.py")


@pytest.fixture(scope="module")
def service() -> Iterator[CoordinatorProcess]:
    service = CoordinatorProcess()
    yield service
    service.stop()


def test_wherever_a_join_is_interrupted_the_process_can_join_again(service: CoordinatorProcess) -> None:
    """A session that nobody could leave would keep the name and the rank, and go on sending heartbeats."""
    init = partial(ferrorpc.init_process_group, coordinator=service.address, world_size=1, timeout=5.0)
    for place in itertools.count(1):
        groups = list[ferrorpc.ProcessGroup]()
        struck = was_struck(place, lambda: groups.append(init()), FILES)  # noqa: B023  called at once
        with groups.pop() if groups else init() as group:
            assert group.all_reduce(1) == 1
        if not struck:
            break
    assert place > 20


def test_wherever_a_leave_is_interrupted_the_process_can_join_again(service: CoordinatorProcess) -> None:
    init = partial(ferrorpc.init_process_group, coordinator=service.address, world_size=1, timeout=5.0)
    for place in itertools.count(1):
        group = init()
        struck = was_struck(place, group.close, ("ferrorpc/coordination/session.py",))
        if not group.session.left:
            group.close()
        with init() as following:
            assert following.all_reduce(1) == 1
        if not struck:
            break
    assert place > 10


def test_the_others_are_told_of_an_interrupt_as_the_rendezvous_ends(
    service: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejoin = RemoteSession.rejoin

    def strike(self: RemoteSession, timeout: float) -> Membership:
        found = rejoin(self, timeout)
        if found.assignment.rank == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(RemoteSession, "rejoin", strike)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, service.address, 1, 2, job="told")
        with pytest.raises(KeyboardInterrupt):
            join(service.address, 0, 2, job="told")
        other = joined.result(20)
    with pytest.raises(PeerLostError, match=r"rank 0 .*KeyboardInterrupt"):
        other.barrier("all")
    other.leave()


def serve_at(ports: list[int]) -> WorkerServer:
    """Starts a server for peers, and notes its port as soon as it is known."""

    class Noting(WorkerServer):
        def _listen(self, bind_host: str) -> int:
            ports.append(super()._listen(bind_host))
            return ports[-1]

    return Noting("127.0.0.1", "127.0.0.1")


def is_refused(port: int) -> bool:
    with socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def test_no_interrupt_strikes_within_grpc_as_a_server_for_peers_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it looks for signals if this is the main thread; it could not stop what it has started in part."""
    main_thread, me, ports = threading.main_thread, threading.get_ident(), list[int]()

    def strike() -> threading.Thread:
        if threading.get_ident() == me:
            raise KeyboardInterrupt
        return main_thread()

    monkeypatch.setattr(threading, "main_thread", strike)
    serve_at(ports).close()
    eventually(partial(is_refused, ports[0]), "the end of the server")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("can't start new thread")])
def test_a_server_for_peers_whose_thread_does_not_start_gives_its_port_back(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise error

    ports = list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises((KeyboardInterrupt, LimitExceededError)):
            serve_at(ports)
    eventually(partial(is_refused, ports[0]), "the end of the server")


def test_a_server_for_peers_that_is_interrupted_as_its_thread_starts_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def strike(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", strike)
        with pytest.raises(KeyboardInterrupt):
            WorkerServer("127.0.0.1", "127.0.0.1")
    for thread in started:
        thread.join(SECONDS)
        assert not thread.is_alive()
