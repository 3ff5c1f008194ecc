"""A session with a coordinator that only the test plays."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ferrorpc import logs
from ferrorpc.config import Config
from ferrorpc.coordination import session as session_module
from ferrorpc.coordination.activity import LINKS_EVERY_BEATS
from ferrorpc.coordination.session import RemoteSession
from ferrorpc.errors import (
    BarrierTimeoutError,
    ConfigError,
    CoordinatorUnavailableError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
)
from ferrorpc.v1 import identity_pb2, nccl_pb2, rendezvous_pb2, session_pb2 as wire
from ferrorpc.wire.error_detail import detail_of
from tests.waiting import eventually

UNANSWERED = re.compile(r"m leaves, but the coordinator at nowhere:1 has not answered for \d+\.\d s: if it was not told,")
IDS = [b"\x01" * 128, b"\x02" * 128]


class Played:
    """A session, and the frames that it has sent on each of its streams."""

    def __init__(self) -> None:
        config = Config({"timeout": 20.0}, {})
        self.session = RemoteSession("nowhere:1", job="job", name="m", policy=(1, 1000), config=config)
        self.connection = self.session._connection
        self.streams: list[list[wire.ClientFrame]] = []
        self.position = identity_pb2.Position(cluster_id="cluster")

    def welcome(self) -> None:
        sent: list[wire.ClientFrame] = []
        self.streams.append(sent)
        self.connection._stream = cast(Any, SimpleNamespace(send=sent.append, close=lambda: None))
        self.connection._handle_frame(wire.ServerFrame(position=self.position, welcome=wire.Welcome(resume_token="token")))

    def lose(self) -> None:
        self.connection._went_down(CoordinatorUnavailableError("it was killed"))

    def answer(self, **result: Any) -> None:
        self.connection._handle_frame(wire.ServerFrame(position=self.position, result=wire.Result(**result)))

    def join(self, size: int, generation: int = 1) -> None:
        """Gives it rank 0 of a world of this size."""
        self.position.generation = generation
        peers = [identity_pb2.Member(name=f"m{rank}") for rank in range(size)]
        self.answer(sequence=99, join=rendezvous_pb2.JoinResponse(generation=generation, rank=0, peers=peers))

    def leave(self, reason: str = "", *, answered: bool = True) -> None:
        """Leaves; where the Leave is not to be answered, the connection is lost meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(self.session.leave, reason)
            (sequence,) = eventually(lambda: [frame.sequence for frame in self.streams[-1] if frame.HasField("leave")])
            if answered:
                self.answer(sequence=sequence, leave=rendezvous_pb2.LeaveResponse())
            else:
                self.lose()
            leaving.result(20)


def joined(size: int = 2) -> Played:
    """A session that is rank 0 of a world of this size."""
    played = Played()
    played.welcome()
    played.join(size)
    return played


def test_an_id_that_was_not_answered_before_an_outage_is_offered_once_after_it() -> None:
    """A second request would count as the first one's end. With more than 128 ranks an id waits for those of other leaders."""
    played = joined(200)
    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(played.session.exchange_nccl_id, "world", 1, range(200), IDS[:1], 20.0)
        (request,) = eventually(lambda: played.streams[0])
        played.lose()
        played.welcome()
        played.answer(sequence=request.sequence, comm_bootstrap=nccl_pb2.CommBootstrapResponse(unique_ids=IDS))
        assert exchange.result(20) == IDS
    played.lose()
    played.welcome()
    offers = [[frame.sequence for frame in sent if frame.HasField("comm_bootstrap")] for sent in played.streams]
    assert offers == [[1], [1], [1]]


def test_every_hello_has_the_address_of_its_time() -> None:
    addresses = iter(["10.0.0.1:7000", "10.0.0.9:7000"])
    session = RemoteSession(
        "nowhere:1", job="job", name="m", policy=(1, 1), worker_address=lambda: next(addresses), config=Config({}, {})
    )
    assert [session.hello("").address, session.hello("token").address] == ["10.0.0.1:7000", "10.0.0.9:7000"]


def test_who_is_without_the_coordinator_says_so_beside_what_is_known_of_the_ranks_it_waits_for() -> None:
    """Its own network may be down, and the ranks that it waits for are well."""
    played = joined()
    assert played.session.described([1]) == ""
    played.lose()
    assert re.fullmatch(
        r"this rank itself: no coordinator at nowhere:1 for \d+\.\d s \(it was killed\)", played.session.described([1])
    )


def test_an_error_that_names_a_file_whose_name_is_not_utf_8_is_told_all_the_same() -> None:
    """Such as FileNotFoundError of os.fsdecode(b"caf\\xe9.txt"): Protobuf refuses it."""
    played = joined()
    played.session.membership.latch.end(GroupAbortedError(0, "no file caf\udce9.txt"))
    played.session.report_link_lost(1, "no file caf\udce9.txt")
    played.leave("FileNotFoundError: caf\udce9.txt")
    failure, lost, _, leave = played.streams[0]
    assert failure.report.failure.message == "rank 0 ended the group: no file caf\\udce9.txt"
    assert lost.report.link_lost.reason == "no file caf\\udce9.txt"
    assert leave.leave.reason == "FileNotFoundError: caf\\udce9.txt"


def test_a_lost_link_to_a_suspect_is_no_end_until_it_has_left() -> None:
    played = joined()
    played.session.report_link_lost(1, "reset by peer")
    for state, reports in [(identity_pb2.MEMBER_STATE_SUSPECT, 1), (identity_pb2.MEMBER_STATE_LEFT, 2)]:
        member = identity_pb2.Member(rank=1, name="m1", state=state)
        played.session.event(wire.Event(standings=wire.Standings(members=[member])))
        assert len(played.streams[0]) == reports
    assert "reset by peer" in played.streams[0][1].report.failure.message


def test_the_last_heartbeat_is_sent_directly_before_the_leave() -> None:
    """Or the job would be shown as of up to half a second before its end."""
    played = joined()
    played.session.activity.note("barrier() #7")
    played.session.activity.set_traffic_source(lambda: {1: ("grpc", 100)})
    played.leave()
    beat, leave = played.streams[0]
    assert (beat.beat.step, beat.beat.activity, beat.beat.links[0].sent_bytes) == (1, "barrier() #7", 100)
    assert leave.HasField("leave")


def test_heartbeats_of_a_generation_tell_only_what_was_done_in_it() -> None:
    """Its members' counts are compared, so all begin at 0, and its ranks may be fewer."""
    played = joined(3)
    former = played.session.activity
    former.set_traffic_source(lambda: {2: ("grpc", 100)})
    former.note("all_reduce #1")
    former.stepped(1.0, 1.0, 1.0)
    played.join(2, generation=2)
    former.note("all_reduce #2")  # an operation of a thread that has not heard of the end yet
    former.operated(1.0)
    for _ in range(LINKS_EVERY_BEATS):
        assert played.session.beat() == wire.Beat(generation=2)
    played.session.activity.note("broadcast #1")
    assert played.session.beat() == wire.Beat(generation=2, step=1, activity="broadcast #1")


@pytest.mark.parametrize("reason", ["", "ValueError: batch 17 is damaged"])
def test_who_leaves_while_the_coordinator_is_away_says_what_follows(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    played = joined()
    played.lose()
    with caplog.at_level("WARNING", "ferrorpc.coordination"):
        played.session.leave(reason)
    assert UNANSWERED.match(caplog.messages[-1])


def test_a_leave_waits_for_a_coordinator_that_can_be_reached(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have stood still for a moment. If it were not told, this rank would be taken for dead."""
    monkeypatch.setattr(session_module, "LEAVE_SECONDS", 0.0)
    played = joined()
    played.leave()
    assert not caplog.messages


def test_a_leave_waits_no_longer_once_the_coordinator_is_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LEAVE_WHILE_UP_SECONDS", 1000.0)
    played = joined()
    played.leave(answered=False)
    assert UNANSWERED.match(caplog.messages[-1])


def test_log_lines_name_the_job_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process says while it joins another job would name the wrong one."""
    monkeypatch.setattr(logs, "_origin", {})
    record = logging.makeLogRecord({"msg": "late", "name": "ferrorpc"})
    played = joined()
    assert "[job=job rank=0 generation=1]" in logs.TextFormatter().format(record)
    played.leave("the end")
    assert logs.TextFormatter().format(record).endswith("ferrorpc: late")


def test_leaving_a_job_does_not_take_the_name_of_the_next_from_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_origin", {})
    logs.set_log_origin("next", 0, 1)
    logs.clear_log_origin("job")
    assert logs._origin["job"] == "next"


def test_who_leaves_after_its_session_has_ended_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its end was told before."""
    played = joined()
    played.connection.close(CoordinatorUnavailableError("nobody answered"))
    with caplog.at_level("WARNING", "ferrorpc.coordination"):
        played.session.leave()
    assert not caplog.messages


@pytest.mark.parametrize("where", ["callback", "answer"])
def test_a_leave_that_is_interrupted_ends_the_session_all_the_same(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its heartbeats go on, and the others wait for a rank that will never come."""
    played = joined()

    def interrupted(*_: object, **__: object) -> None:
        if strikes:
            raise strikes.pop()

    strikes, closed = [KeyboardInterrupt()], list[str]()
    played.session.on_leave(lambda: closed.append("server"))
    if where == "callback":
        monkeypatch.setattr(played.connection, "try_ask", lambda *_, **__: closed.append("asked"))
        played.session.on_leave(interrupted)
    else:
        monkeypatch.setattr(played.connection, "try_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        played.session.leave()
    assert isinstance(played.connection.ended_by, GroupClosedError)
    assert isinstance(played.session.membership.latch.cause, GroupClosedError)
    assert closed == (["asked", "server"] if where == "callback" else ["server"])


@pytest.mark.parametrize(
    ("missing", "text"), [([0, 1], "rank 0 came when the others had given up: too late"), ([1], "too late")]
)
def test_who_comes_to_a_barrier_that_was_given_up_is_told_so(missing: list[int], text: str) -> None:
    played = joined(3)
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(played.session.barrier, "epoch", timeout=20.0)
        (request,) = eventually(lambda: played.streams[0])
        played.answer(sequence=request.sequence, error=detail_of(BarrierTimeoutError(missing, "too late")))
        with pytest.raises(BarrierTimeoutError) as caught:
            arrival.result(20)
    assert (caught.value.message, caught.value.missing) == (text, missing)


def rank_claimed(retryable: bool) -> FerroError:
    return ConfigError("rank 0 is claimed by m and by host-0", retryable=retryable)


def test_who_is_refused_for_one_that_may_be_dead_asks_again_until_it_is_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """As the processes of a job that was killed as it formed, and that is started again at once."""
    played = Played()
    played.welcome()
    with ThreadPoolExecutor(1) as pool, caplog.at_level("WARNING", "ferrorpc.coordination"):
        rejoining = pool.submit(played.session.rejoin, 20.0)
        for asked in (1, 2):
            frames = eventually(lambda asked=asked: played.streams[0] if len(played.streams[0]) == asked else None)
            played.answer(sequence=frames[-1].sequence, error=detail_of(rank_claimed(retryable=True)))
        frames = eventually(lambda: played.streams[0] if len(played.streams[0]) == 3 else None)
        played.position.generation = 1
        place = rendezvous_pb2.JoinResponse(generation=1, rank=0, peers=[identity_pb2.Member(name="m")])
        played.answer(sequence=frames[-1].sequence, join=place)
        assert rejoining.result(20).assignment.size == 1
    times = [frame.join.timeout_ms for frame in frames]
    assert 20_000 >= times[0] >= times[1] + 900 >= times[2] + 1_800
    said = [record.getMessage() for record in caplog.records if record.name == "ferrorpc.coordination"]
    assert said == ["m asks again for up to 20 s: rank 0 is claimed by m and by host-0"]


@pytest.mark.parametrize(("retryable", "timeout"), [(False, 20.0), (True, 0.5)])
def test_who_is_refused_for_good_or_has_no_time_left_does_not_ask_again(retryable: bool, timeout: float) -> None:
    played = Played()
    played.welcome()
    with ThreadPoolExecutor(1) as pool:
        rejoining = pool.submit(played.session.rejoin, timeout)
        (request,) = eventually(lambda: played.streams[0])
        played.answer(sequence=request.sequence, error=detail_of(rank_claimed(retryable)))
        with pytest.raises(ConfigError, match="rank 0 is claimed"):
            rejoining.result(20)
    assert len(played.streams[0]) == 1


def test_who_was_refused_and_leaves_asks_no_more() -> None:
    played = Played()
    played.welcome()
    with ThreadPoolExecutor(1) as pool:
        rejoining = pool.submit(played.session.rejoin, 20.0)
        (request,) = eventually(lambda: played.streams[0])
        played.answer(sequence=request.sequence, error=detail_of(rank_claimed(retryable=True)))
        played.connection.close(GroupClosedError("m has left job 'job'"))
        with pytest.raises(GroupClosedError):
            rejoining.result(20)
    assert len(played.streams[0]) == 1


def test_who_rejoins_over_a_connection_that_was_refused_is_told_so_at_once() -> None:
    """Also where another request might be granted later: this connection sends none any more."""
    played = Played()
    played.welcome()
    played.connection.close(ConfigError("the name is another's", retryable=True))
    with pytest.raises(ConfigError, match="the name is another's"), ThreadPoolExecutor(1) as pool:
        pool.submit(played.session.rejoin, 600.0).result(5)


def test_a_barrier_that_has_raised_is_not_arrived_at_after_an_outage() -> None:
    """It would release the others, who would go on without this rank."""
    played = joined()
    played.lose()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(played.session.barrier, "checkpoint")
        eventually(played.connection._requests.to_send)
        played.session.session_ended(GroupAbortedError(0, "out of memory"))
        with pytest.raises(GroupAbortedError):
            waiting.result(20)
    played.welcome()
    assert played.streams[-1] == []


def test_who_waits_for_the_coordinator_hears_of_the_end_also_where_a_watcher_of_the_latch_raises() -> None:
    def raises() -> None:
        raise RuntimeError("a watcher's bug")

    played = joined()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(played.session.barrier, "epoch")
        eventually(lambda: played.connection._condition._waiting)
        played.session.membership.latch.watch(raises)
        with pytest.raises(RuntimeError):
            played.session.session_ended(GroupAbortedError(0, "out of memory"))
        with pytest.raises(GroupAbortedError):
            waiting.result(2.0)
