"""Ctrl-C within init_process_group(): wherever it comes, the others hear of it, and the process can join again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import ferrorpc
from ferrorpc import PeerLostError
from ferrorpc.coordination.base import Membership
from ferrorpc.coordination.session import RemoteSession
from ferrorpc.transports.grpc.server import WorkerServer
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join
from tests.threads import SECONDS
from tests.unit.test_interrupted_ends import was_struck

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


def test_a_server_for_peers_that_is_interrupted_as_its_thread_starts_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def strike(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", strike)
        with pytest.raises(KeyboardInterrupt):
            WorkerServer("127.0.0.1", "127.0.0.1")
    started[0].join(SECONDS)
    assert not started[0].is_alive()
