"""What a member does while its coordinator, its connection or the member itself is away."""

import contextlib
import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from ferrorpc.config import Config
from ferrorpc.coordination import connection, wait_log
from ferrorpc.coordination.channel import ChannelFactory
from ferrorpc.errors import (
    CoordinatorUnavailableError,
    GroupAbortedError,
    GroupClosedError,
    NcclError,
    PeerLostError,
    StaleGenerationError,
)
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.v1 import identity_pb2, session_pb2, session_pb2_grpc
from ferrorpc.wire.options import control_server
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join, join_all
from tests.integration.slow_link import slow_link
from tests.threads import together
from tests.waiting import eventually

IMPATIENT = {"lease": 1.0, "heartbeat_interval": 0.2}


@pytest.fixture
def durable(tmp_path):
    service = CoordinatorProcess("--data-dir", str(tmp_path / "journal"))
    yield service
    service.stop()


def test_kill_9_of_the_coordinator_and_a_restart_fail_nobody(durable):
    sessions = join_all(durable.address, 3, **IMPATIENT)
    sessions[0].store.set("acknowledged", b"before")
    counted = sessions[0].store.add("count")
    waiting = threading.Thread(target=lambda: results.append(sessions[2].store.get("later", timeout=30)))
    results: list[bytes] = []
    waiting.start()
    durable.kill()
    outcomes: list = []
    barrier = threading.Thread(
        target=lambda: outcomes.extend(together([lambda s=s: s.barrier("b", timeout=30) for s in sessions]))
    )
    barrier.start()
    time.sleep(0.5)
    durable.start()
    barrier.join(30)
    assert outcomes == [[b"", b"", b""]] * 3
    assert sessions[1].store.get("acknowledged", timeout=0) == b"before"
    assert sessions[1].store.add("count") == counted + 1
    sessions[1].store.set("later", b"after")
    waiting.join(30)
    assert results == [b"after"]
    time.sleep(1.5 * IMPATIENT["lease"])
    assert [session.membership.latch.cause for session in sessions] == [None] * 3
    together([session.leave for session in sessions])


def test_a_joiner_that_gave_up_while_the_coordinator_was_away_is_pending_no_more(durable):
    """A program that calls reform() whenever somebody is pending would do so for ever."""
    sessions = join_all(durable.address, 2, (1, 3))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, durable.address, 7, (1, 3), timeout=4.0)
        eventually(lambda: [session.pending_members for session in sessions] == [["member-7"]] * 2)
        durable.kill()
        assert isinstance(joining.exception(60), CoordinatorUnavailableError)
    durable.start()
    eventually(lambda: [session.pending_members for session in sessions] == [[]] * 2)
    together([session.leave for session in sessions])


def test_an_id_that_a_leader_gave_before_the_coordinator_was_killed_reaches_who_asks_afterwards(durable):
    """The coordinator keeps ids in memory alone, and the leader has had its answer."""
    sessions, minted = join_all(durable.address, 2), b"\x07" * 128
    assert sessions[0].exchange_nccl_id("world", 1, [0, 1], [minted], 20.0) == [minted]
    durable.kill()
    durable.start()
    assert sessions[1].exchange_nccl_id("world", 1, [0, 1], None, 30.0) == [minted]
    together([session.leave for session in sessions])


def test_a_lost_link_that_was_reported_before_the_coordinator_was_killed_is_judged_all_the_same(durable):
    sessions = join_all(durable.address, 2, **IMPATIENT)
    sessions[0].report_link_lost(1, "connection reset")
    assert sessions[0].store.keys() == [], "the report before it has been answered"
    durable.kill()
    durable.start()
    for session in sessions:
        cause = eventually(lambda s=session: s.membership.latch.cause)
        assert isinstance(cause, GroupAbortedError)
        assert "connection reset" in str(cause)
    together([session.leave for session in sessions])


class Mute(session_pb2_grpc.CoordinatorServiceServicer):
    """Takes the first stream and says nothing on it; the next one is welcome."""

    def __init__(self):
        self.streams = 0

    def Session(self, frames, context):
        next(frames)
        self.streams += 1
        if self.streams > 1:
            position = identity_pb2.Position(cluster_id="cluster", epoch=1)
            yield session_pb2.ServerFrame(position=position, welcome=session_pb2.Welcome(resume_token="token"))
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(60)


def test_a_coordinator_that_takes_a_stream_and_says_nothing_is_dialled_again(monkeypatch):
    """As after a network swallowed the first frames: nobody else would ever end such a wait."""
    monkeypatch.setattr(connection, "WELCOME_SECONDS", 0.5)
    mute, server = Mute(), grpc.server(ThreadPoolExecutor(4), options=control_server())
    session_pb2_grpc.add_CoordinatorServiceServicer_to_server(mute, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    listener = SimpleNamespace(
        hello=lambda token: session_pb2.Hello(name="m"),
        beat=session_pb2.Beat,
        welcomed=lambda: None,
        session_ended=lambda cause: None,
    )
    connected = connection.Connection(
        ChannelFactory(address, "job", Config()),
        listener,
        SYSTEM_CLOCK,
        join_timeout=20,
        max_outage=20,
        heartbeat_interval=0.1,
    )
    try:
        connected.start()
        eventually(lambda: connected.outage() == "" or None)
        assert mute.streams == 2
    finally:
        connected.close(GroupClosedError("the test is over"))
        server.stop(0)


def test_who_comes_back_while_the_coordinators_disk_is_stuck_stays_a_member(durable, tmp_path, monkeypatch):
    """Its Welcome waits for the rows of others, so it is heard of before that."""
    monkeypatch.setattr(connection, "WELCOME_SECONDS", 2.5)
    sessions = join_all(durable.address, 2, lease=2.0, heartbeat_interval=0.2)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal" / "journal.sqlite")) as disk, ThreadPoolExecutor(1) as pool:
        disk.execute("BEGIN IMMEDIATE")
        write = pool.submit(sessions[0].store.set, "k", b"v")
        time.sleep(0.5)
        sessions[1]._connection._stream.close()
        time.sleep(4.5)  # longer than a stream without a Welcome is kept, which is longer than the lease
        disk.rollback()
        write.result(30)
    assert sessions[1].store.get("k", timeout=20) == b"v"
    assert [session.membership.latch.cause for session in sessions] == [None] * 2
    together([session.leave for session in sessions])


def test_a_session_goes_on_where_answers_come_late(durable, caplog):
    """As where they wait behind tensors on a slow link, while its beats arrive."""
    with slow_link(durable.address) as narrow, caplog.at_level("WARNING", "ferrorpc.coordination"):
        session = join(narrow.address, 0, 1)
        narrow.answer_seconds = 2.0
        time.sleep(4.0)  # for a ping and its answer
        assert caplog.records == []
        narrow.answer_seconds = 0.0
        session.leave()


def test_the_return_of_a_lost_coordinator_is_logged_as_loudly_as_its_loss(durable, caplog):
    session = join(durable.address, 0, 1)
    with caplog.at_level("WARNING", "ferrorpc.coordination"):
        durable.kill()
        durable.start()
        session.store.set("key", b"value")
    lines = [record.getMessage() for record in caplog.records]
    assert ["lost the coordinator" in line for line in lines] == [True, False]
    assert "is back after" in lines[1]
    assert "the session goes on" in lines[1]
    session.leave()


def test_additions_are_counted_once_through_restarts(durable):
    session = join(durable.address, 0, 1)
    done = threading.Event()

    def disturb() -> None:
        for _ in range(3):
            time.sleep(0.2)
            durable.kill()
            durable.start()
        done.set()

    thread = threading.Thread(target=disturb)
    thread.start()
    additions = 0
    while not done.is_set():
        additions += 1
        assert session.store.add("count") == additions
    thread.join()
    session.leave()


@pytest.fixture
def volatile():
    service = CoordinatorProcess()
    yield service
    service.stop()


def test_a_coordinator_without_its_journal_is_another_cluster_and_says_so(volatile):
    service = volatile
    sessions = join_all(service.address, 2)
    sessions[0].store.set("gone", b"soon")
    before = service.cluster_id
    service.kill()
    service.start()
    for session in sessions:
        cause = eventually(lambda s=session: s.membership.latch.cause)
        assert isinstance(cause, StaleGenerationError)
        assert before in str(cause)
        assert service.cluster_id in str(cause)
    memberships = together([lambda s=s: s.rejoin(20) for s in sessions])
    assert {m.assignment.cluster_id for m in memberships} == {service.cluster_id}
    assert sessions[0].store.keys() == []
    together([session.leave for session in sessions])


@pytest.mark.parametrize("what", ["failure", "lost link"])
def test_a_report_is_made_though_another_cluster_had_one_in_a_generation_of_this_number(volatile, what):
    """A cluster that is new counts generations from 1 again."""
    sessions = join_all(volatile.address, 2, **IMPATIENT)
    sessions[0].report_link_lost(1, "before")
    sessions[0].membership.latch.end(NcclError("before"))
    eventually(lambda: all(session.membership.latch.cause for session in sessions))
    volatile.kill()
    volatile.start()
    eventually(lambda: all(session._connection.cluster_id == volatile.cluster_id for session in sessions))
    memberships = together([lambda s=s: s.rejoin(20) for s in sessions])
    assert [m.assignment.generation for m in memberships] == [1, 1]
    if what == "failure":
        sessions[0].membership.latch.end(NcclError("afterwards"))
    else:
        sessions[0].report_link_lost(1, "afterwards")
    for membership in memberships:
        assert "afterwards" in str(eventually(lambda m=membership: m.latch.cause))
    together([session.leave for session in sessions])


@pytest.mark.parametrize("reformed", [False, True], ids=["same generation", "later generation"])
def test_an_older_copy_of_the_journal_under_a_running_job_is_told_of(durable, tmp_path, reformed):
    """Else what add() counted once would be counted again, and deaths be judged in a generation that nobody lives in."""
    sessions = join_all(durable.address, 2)
    shutil.copytree(tmp_path / "journal", tmp_path / "copy")
    if reformed:
        sessions[0].membership.latch.end(GroupAbortedError(0, "on purpose"))
        together([lambda s=s: s.rejoin(20) for s in sessions])
    counted = [session.store.add("count") for session in sessions]
    memberships = [session.membership for session in sessions]
    durable.kill()
    shutil.rmtree(tmp_path / "journal")
    (tmp_path / "copy").rename(tmp_path / "journal")
    durable.start()
    for membership in memberships:
        cause = eventually(lambda m=membership: m.latch.cause)
        assert isinstance(cause, StaleGenerationError)
        assert "older journal" in str(cause)
    again = together([lambda s=s: s.rejoin(20) for s in sessions])
    assert {m.assignment.generation for m in again} == {memberships[0].assignment.generation + 1}
    assert sessions[0].store.add("count") <= counted[1]
    assert [m.latch.cause for m in again] == [None, None]
    together([session.leave for session in sessions])


def test_a_store_that_the_coordinator_has_lost_is_refused_until_the_next_generation(volatile):
    """A counter that silently began anew would hand out the same numbers twice."""
    sessions = join_all(volatile.address, 2)
    assert [session.store.add("next") for session in sessions] == [1, 2]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sessions[1].store.get, "never", 60.0)
        volatile.kill()
        volatile.start()
        with pytest.raises(StaleGenerationError, match="without its journal"):
            waiting.result(30)
    for use in (lambda store: store.add("next"), lambda store: store.keys(), lambda store: store.wait("never", 60.0)):
        with pytest.raises(StaleGenerationError, match="without its journal"):
            use(sessions[1].store)
    together([lambda s=s: s.rejoin(20) for s in sessions])
    assert [session.store.add("next") for session in sessions] == [1, 2]
    together([session.leave for session in sessions])


def test_ranks_are_kept_where_the_coordinator_has_forgotten_them(volatile):
    sessions = join_all(volatile.address, 2, (2, 3), hinted_rank=None)
    volatile.kill()
    volatile.start()
    for session in sessions:
        eventually(lambda s=session: s.membership.latch.cause)
    with ThreadPoolExecutor(1) as pool, grpc.insecure_channel(volatile.address) as channel:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        second = pool.submit(sessions[1].rejoin, 20)  # it comes first

        def waits():
            with contextlib.suppress(grpc.RpcError):  # until then there is no such job
                return stub.Status(session_pb2.StatusRequest(job="trial"), timeout=10).waiting_reason

        eventually(waits)
        first = sessions[0].rejoin(20)
        assert [first.assignment.rank, second.result(20).assignment.rank] == [0, 1]
    together([session.leave for session in sessions])


def test_a_coordinator_that_stays_away_is_an_error_after_max_outage(volatile):
    session = join(volatile.address, 0, 1, max_outage=1.5)
    volatile.kill()
    with pytest.raises(CoordinatorUnavailableError, match=r"nobody answered at .* for [0-9.]+ s; the last attempt"):
        session.store.get("key", timeout=0)
    assert isinstance(session.membership.latch.cause, CoordinatorUnavailableError)
    session.leave()


def test_who_is_told_that_the_connection_has_ended_finds_the_generation_broken(volatile, monkeypatch):
    session = join(volatile.address, 0, 1, max_outage=0.5)
    ended = session.session_ended
    monkeypatch.setattr(session, "session_ended", lambda cause: (time.sleep(0.2), ended(cause)))
    volatile.kill()
    with pytest.raises(CoordinatorUnavailableError):
        session.store.get("key", timeout=0)
    assert isinstance(session.membership.latch.cause, CoordinatorUnavailableError)
    session.leave()


def test_a_coordinator_that_goes_during_the_rendezvous_is_an_error_after_its_timeout(volatile, caplog):
    """As where it was another run's, which has ended: who has no rank yet must not wait for it as long as a member."""
    caplog.set_level(logging.INFO, "ferrorpc.coordination")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, volatile.address, 0, 2, timeout=4.0, max_outage=60.0)
        eventually(lambda: "this is a new session" in caplog.text)
        volatile.kill()
        with pytest.raises(CoordinatorUnavailableError, match=r"nobody answered at .* for [4-9.][0-9.]* s; the last attempt"):
            joining.result(60)


def test_a_pause_of_the_coordinator_fails_nobody():
    """It is longer than keepalives, leases, grace and stall, so members come back on new streams."""
    service = CoordinatorProcess("--grace", "0.5", "--stall", "2")
    try:
        sessions = join_all(service.address, 2, **IMPATIENT)
        service.pause()
        time.sleep(4.0)
        service.resume()
        assert together([lambda s=s: len(s.barrier("b", timeout=20)) for s in sessions]) == [2, 2]
        time.sleep(1.5 * IMPATIENT["lease"])
        assert [s.membership.latch.cause for s in sessions] == [None, None]
        together([s.leave for s in sessions])
    finally:
        service.stop()


def test_a_failure_ends_the_generation_at_home_though_the_coordinator_says_nothing(volatile):
    session = join(volatile.address, 0, 1)
    volatile.pause()
    try:
        session.membership.latch.end(NcclError("the wire is cut"))
        assert session.membership.latch.cause is None, "the coordinator may know an earlier cause"
        cause = eventually(lambda: session.membership.latch.cause)
    finally:
        volatile.resume()
    assert (type(cause), cause.message) == (NcclError, "the wire is cut")
    session.leave()


def test_waiting_is_explained_after_a_while(durable, caplog, monkeypatch):
    monkeypatch.setattr(wait_log, "EXPLAIN_FIRST_SECONDS", 0.4)
    monkeypatch.setattr(wait_log, "EXPLAIN_FACTOR", 1000.0)
    sessions = join_all(durable.address, 2)
    with caplog.at_level(logging.WARNING, logger="ferrorpc.coordination"):
        outcome = together([lambda: sessions[0].barrier("epoch", timeout=2.0)])
    lines = [record.getMessage() for record in caplog.records if "barrier 'epoch'" in record.getMessage()]
    assert len(lines) == 1
    assert "member-1" in lines[0]
    assert outcome[0].missing == [1]
    together([s.leave for s in sessions])


MEMBER = """
import sys, time
from ferrorpc.errors import FerroError
from tests.integration.members import join
session = join(sys.argv[1], 1, 2)
print("joined", flush=True)
{body}
"""


def member(address: str, body: str) -> subprocess.Popen:
    """Rank 1 of 2 in a process of its own, which has joined."""
    return subprocess.Popen([sys.executable, "-c", MEMBER.format(body=body), address], stdout=subprocess.PIPE, text=True)


def with_member(service: CoordinatorProcess, body: str):
    process = member(service.address, body)
    session = join(service.address, 0, 2)
    assert process.stdout.readline() == "joined\n"
    return session, process


def end(session, process) -> None:
    session.leave()
    process.kill()
    process.wait(60)
    process.stdout.close()


def test_kill_9_of_a_member_is_pushed_to_the_others(durable):
    session, process = with_member(durable, "time.sleep(60)")
    process.kill()
    cause = eventually(lambda: session.membership.latch.cause, seconds=20.0)  # long before one that is only silent is evicted
    assert isinstance(cause, PeerLostError)
    assert cause.rank == 1
    end(session, process)


def test_an_uncaught_exception_is_the_others_cause(durable):
    session, process = with_member(durable, "raise ValueError('no such file')")
    cause = eventually(lambda: session.membership.latch.cause)
    assert isinstance(cause, PeerLostError)
    assert (cause.rank, cause.reason) == (1, "ValueError: no such file")
    assert process.wait(60) == 1
    end(session, process)


def test_a_script_that_never_leaves_ends_soon_and_fails_nobody(durable):
    session, process = with_member(durable, "")
    assert process.wait(10) == 0
    eventually(lambda: session.describe([1], 1.0)[0].state == "left")
    assert session.membership.latch.cause is None
    end(session, process)


def test_an_uncaught_membership_error_ends_with_exit_code_75(durable):
    session, process = with_member(durable, "session.barrier('never', timeout=30)")
    eventually(lambda: session.store.keys() == [])
    session.leave("RuntimeError: gone")
    assert process.wait(60) == 75
    end(session, process)


def test_a_forked_child_is_no_member(durable):
    body = """
import os, warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    try:
        session.store.set("from-the-child", b"1")
    except FerroError as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
os.waitpid(child, 0)
session.store.set("from-the-parent", b"1")
print("parent", flush=True)
time.sleep(60)
"""
    session, process = with_member(durable, body)
    assert process.stdout.readline() == "UsageError\n"
    assert process.stdout.readline() == "parent\n"
    assert session.store.keys() == ["from-the-parent"]
    assert session.membership.latch.cause is None
    end(session, process)


def test_a_proxy_in_the_environment_is_not_asked(durable, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    join(durable.address, 0, 1).leave()
