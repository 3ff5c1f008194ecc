"""The connection to the coordinator: nobody waits for an answer that cannot come."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from ferrorpc.coordination import connection as module
from ferrorpc.coordination.connection import Connection
from ferrorpc.errors import (
    AuthenticationError,
    BarrierTimeoutError,
    CollectiveTimeoutError,
    ConfigError,
    CoordinatorUnavailableError,
    FerroError,
    PermissionDeniedError,
    RendezvousTimeoutError,
    StaleGenerationError,
    StoreTimeoutError,
    UsageError,
    VersionMismatchError,
)
from ferrorpc.guard import SYSTEM_CLOCK, Clock, SystemClock
from ferrorpc.testing import ManualClock
from ferrorpc.v1 import rendezvous_pb2, session_pb2 as wire, store_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.status import Trailers, error_of, to_status
from tests.waiting import eventually

A_SET = store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k"))


def connection(clock: Clock = SYSTEM_CLOCK, join_timeout: float = 1.0) -> Connection:
    nobody: Any = SimpleNamespace(address="nowhere:1", diagnose=lambda: None)
    listener: Any = SimpleNamespace(
        welcomed=lambda: None,
        result=lambda position, result: None,
        session_ended=lambda cause: None,
        hello=lambda token: wire.Hello(),
        beat=wire.Beat,
    )
    return Connection(nobody, listener, clock, join_timeout=join_timeout, max_outage=1.0, heartbeat_interval=1.0)


def welcomed(connection: Connection, send: Callable[[wire.ClientFrame], None] = lambda frame: None) -> Connection:
    """It is up, on a stream that goes nowhere."""
    connection._stream = cast(Any, SimpleNamespace(send=send, close=lambda: None))
    connection._handle_frame(wire.ServerFrame(welcome=wire.Welcome(resume_token="token")))
    return connection


def test_a_request_on_a_connection_that_has_ended_is_refused() -> None:
    over = connection()
    over.close(AuthenticationError("the token is not one of this coordinator's"))
    over.close(CoordinatorUnavailableError("it stays away"))
    with pytest.raises(AuthenticationError, match="the token"):
        over.post("a set", store=A_SET)


def test_it_is_refused_with_the_cause_on_a_thread_that_has_the_reading_threads_identifier_now() -> None:
    over = connection()
    over.close(CoordinatorUnavailableError("it stays away"))
    over._read()
    with pytest.raises(CoordinatorUnavailableError, match="it stays away"):
        over.ask("a set", 0.1, CoordinatorUnavailableError, store=A_SET)


def test_the_reading_thread_does_not_wait_for_itself_as_it_fails_by_a_bug() -> None:
    failing, told = connection(), list[FerroError]()

    def ask(cause: FerroError) -> None:
        with pytest.raises(UsageError) as raised:
            failing.ask("a set", 0.1, CoordinatorUnavailableError, store=A_SET)
        told.append(raised.value)

    failing._listener.session_ended = ask  # type: ignore[method-assign]
    failing._stay_connected = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        failing._read()
    assert len(told) == 1
    assert failing.ended_by is not None


def test_so_is_one_that_is_made_while_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait have been told by then: this one would wait for ever."""
    ending = connection()

    def ends_meanwhile(label: str, **body: Any) -> None:
        ending.close(AuthenticationError("the token is not one of this coordinator's"))

    monkeypatch.setattr(module, "check_size", ends_meanwhile)
    with pytest.raises(AuthenticationError, match="the token"):
        ending.ask("a set", 0.1, CoordinatorUnavailableError)


def test_a_request_that_is_being_sent_again_after_an_outage_is_not_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits may look in the moment in which the connection is up again."""
    clock = ManualClock()
    back = welcomed(connection(clock))
    request = back.post("a get", store=A_SET)
    back._went_down(CoordinatorUnavailableError("it was killed"))
    clock.advance(60.0)
    assert back._give_up_at(request, 0.0) > clock.now(), "its time does not run during an outage"
    to_send, looks = back._requests.to_send, list[Future[float]]()
    with ThreadPoolExecutor(1) as pool:

        def looked_at_meanwhile() -> Any:
            looks.append(pool.submit(back._give_up_at, request, 0.0))
            wait(looks, 0.2)
            return to_send()

        monkeypatch.setattr(back._requests, "to_send", looked_at_meanwhile)
        welcomed(back)
        assert looks[0].result() > clock.now()


def test_who_waits_for_the_first_answer_does_not_wait_for_the_end_of_an_attempt() -> None:
    """Where a coordinator accepts connections and is silent, gRPC gives one up after some seconds."""
    clock = ManualClock()
    silent, until = connection(clock, join_timeout=5.0), clock.now() + 5.0
    clock.advance(5.0)
    silent.wait_until_up("the rendezvous", until)
    text = "nobody answered at nowhere:1 for 5.0 s; the last attempt: neither refused nor answered"
    assert isinstance(silent.ended_by, CoordinatorUnavailableError)
    assert text in str(silent.ended_by)


def test_the_time_of_a_request_goes_on_when_the_connection_is_back() -> None:
    """Where large packets are lost, a request breaks each stream on which it is sent, and small frames soon bring the next."""
    clock = ManualClock()
    flapping = welcomed(connection(clock))
    request = flapping.post("a set", store=A_SET)
    for _ in range(4):
        clock.advance(2.0)
        flapping._went_down(CoordinatorUnavailableError("Connection timed out"))
        clock.advance(50.0)
        welcomed(flapping)
    assert flapping._give_up_at(request, 5.0) == clock.now() + 5.0 + module.REPLY_MARGIN_SECONDS - 4 * 2.0


def test_what_is_sent_again_asks_for_the_time_that_is_left() -> None:
    """A coordinator that was started again knows nothing of it."""
    clock, sent = ManualClock(), list[wire.ClientFrame]()
    back = welcomed(connection(clock))
    back.post("a get", store=store_pb2.StoreRequest(get=store_pb2.GetOperation(wait_ms=5000)))
    clock.advance(2.0)
    back._went_down(CoordinatorUnavailableError("it was killed"))
    clock.advance(50.0)
    welcomed(back, sent.append)
    assert [frame.store.get.wait_ms for frame in sent] == [3000]


@pytest.mark.parametrize(
    "kind",
    [StoreTimeoutError, *(partial(kind, []) for kind in (BarrierTimeoutError, CollectiveTimeoutError, RendezvousTimeoutError))],
)
def test_where_the_coordinator_does_not_answer_nobody_else_is_blamed(kind: Callable[..., FerroError]) -> None:
    clock = ManualClock()
    mute = welcomed(connection(clock))
    clock.advance(1.0)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(mute.ask, "a request", 5.0 - 1e-5, kind, store=A_SET)
        eventually(lambda: mute._condition._waiting)
        clock.advance(8.0)
        error = cast(Any, asking.exception(20))
    assert error.message == "a request: the coordinator at nowhere:1 has not answered for 8 s"
    assert "disk may be stuck" in error.hint
    assert "a write may have been carried out" in error.hint
    assert error.retryable
    assert not getattr(error, "missing", []) + getattr(error, "waiting_on", [])


def test_an_answer_that_comes_in_the_moment_of_giving_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    up = welcomed(connection(ManualClock()))
    drop = up._requests.drop

    def comes_just_now(request: Any) -> None:
        up._requests.complete(request.frame.sequence, store_pb2.StoreResponse(number=7))
        drop(request)

    monkeypatch.setattr(up._requests, "drop", comes_just_now)
    monkeypatch.setattr(up, "_give_up_at", lambda request, seconds: 0.0)
    assert up.ask("an add", 0.0, StoreTimeoutError, store=A_SET).number == 7


def test_a_request_that_was_interrupted_is_not_sent_again_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    up = welcomed(connection(ManualClock()))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        up.ask("an add", 1.0, StoreTimeoutError, store=A_SET)
    assert not up._requests.to_send()


class StandingClock(SystemClock):
    """Whoever parks wakes `late` seconds late: the process stood still. After a few times the connection ends."""

    def __init__(self, late: float) -> None:
        self.late, self.seconds, self.parked = late, 0.0, 0
        self.end = lambda: None
        self.now = lambda: self.seconds  # type: ignore[method-assign]

    def parker(self) -> Any:
        def park(until: float) -> bool:
            self.seconds, self.parked = until + self.late, self.parked + 1
            if self.parked > 3:
                self.end()
            return False

        return SimpleNamespace(park=park, unpark=lambda: None)


@pytest.mark.parametrize("late", [0.0, 60.0])
def test_a_process_that_stood_still_gives_the_coordinator_its_time_for_the_welcome(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have come meanwhile. The end of the stream would be that of the session."""
    clock = StandingClock(late)
    monkeypatch.setattr(module, "WELCOME_SECONDS", 10.0 if late else 2.5)
    waiting, closed = connection(clock), list[FerroError | None]()
    waiting._stream = cast(Any, SimpleNamespace(close=lambda why=None: closed.append(why)))
    clock.end = lambda: setattr(waiting, "ended_by", AuthenticationError("the test is over"))
    waiting._keep_lease()
    assert [str(why).partition("\n")[0] for why in closed] == (
        [] if late else ["the coordinator at nowhere:1 took the call, but has sent no Welcome for 2.5 s"]
    )


def test_the_first_frame_of_each_stream_is_its_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take long to make, while heartbeats are due; they go out as soon as it has, whatever the Welcome waits for."""
    streams: list[list[str]] = []
    beats = threading.Event()
    joining = connection()
    joining._interval = 0.01

    def hello(token: str) -> wire.Hello:
        time.sleep(0.1)
        return wire.Hello()

    def dial(_: object) -> Any:
        sent: list[str] = []
        streams.append(sent)
        beats.clear()

        def send(frame: wire.ClientFrame) -> None:
            sent.append(str(frame.WhichOneof("body")))
            if sent[-1] == "beat":
                beats.set()

        def frames() -> Iterator[wire.ServerFrame]:
            assert beats.wait(20)
            yield wire.ServerFrame(welcome=wire.Welcome(resume_token="token"))

        return SimpleNamespace(send=send, frames=frames, close=beats.set)

    monkeypatch.setattr(joining._listener, "hello", hello)
    monkeypatch.setattr(module, "SessionStream", dial)
    joining.start()
    eventually(lambda: len(streams) >= 3)
    joining.close(AuthenticationError("it has left"))
    eventually(lambda: joining._reader not in [thread.ident for thread in threading.enumerate()])
    assert [sent[:2] for sent in streams[:2]] == [["hello", "beat"]] * 2


def test_a_connection_that_ends_while_it_is_dialled_says_nothing_on_the_new_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hello would resume the session of a member that has left, and that sends no heartbeats any more."""
    ending = connection()
    done: list[object] = []

    def dial(_: object) -> Any:
        ending.close(AuthenticationError("it has left"))
        return SimpleNamespace(send=done.append, frames=list, close=lambda: done.append("closed"))

    monkeypatch.setattr(module, "SessionStream", dial)
    ending._run_stream()
    assert done == ["closed"]


def test_a_member_that_is_fenced_is_not_told_of_another_cluster() -> None:
    up = welcomed(connection())
    fenced = wire.Event(fenced=detail_of(StaleGenerationError("it was declared dead")))
    with pytest.raises(StaleGenerationError, match="declared dead"):
        up._handle_frame(wire.ServerFrame(event=fenced))
    assert up.memory.cause is None


def test_the_connection_ends_once_the_coordinator_has_answered_the_leave() -> None:
    """Else it is dialled again, and refused as one that left: that would be what later calls hear of."""
    gone = welcomed(connection())
    gone.leave_error = AuthenticationError("it has left")
    request = gone.post("leave", leave=rendezvous_pb2.LeaveRequest())
    gone._handle_frame(wire.ServerFrame(result=wire.Result(sequence=1, leave=rendezvous_pb2.LeaveResponse())))
    assert isinstance(request.outcome, rendezvous_pb2.LeaveResponse)
    with pytest.raises(AuthenticationError, match="it has left"):
        gone.post("a set", store=A_SET)


class Ended(grpc.RpcError):
    """A call that ended with a status of gRPC, with the trailing metadata of ferrorpc or without."""

    def __init__(self, status: grpc.StatusCode, trailers: Trailers = ()) -> None:
        self.code = lambda: status
        self.details = lambda: "no details"
        self.trailing_metadata = lambda: trailers


def ends(connection: Connection, error: FerroError) -> bool:
    return connection._is_final(connection._diagnosed(error))


@pytest.mark.parametrize("status", ["UNIMPLEMENTED", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "UNKNOWN"])
def test_a_stranger_that_answers_at_the_coordinators_address_ends_no_session(status: str) -> None:
    """As a proxy does while the coordinator restarts: its HTTP status 404 is UNIMPLEMENTED to gRPC, 403 PERMISSION_DENIED."""
    assert not ends(welcomed(connection()), error_of(Ended(grpc.StatusCode[status])))


@pytest.mark.parametrize("status", ["UNIMPLEMENTED", "PERMISSION_DENIED", "UNAUTHENTICATED"])
def test_a_stranger_that_answers_at_the_first_attempt_is_told_of_at_once(status: str) -> None:
    assert ends(connection(), error_of(Ended(grpc.StatusCode[status]))), "the address may be wrong"


def test_a_member_whose_token_is_refused_tries_again_as_one_of_both_files_may_be_replaced_later() -> None:
    """The coordinator reads its file every second, so it may not know a member's new token yet."""
    status, _, trailers = to_status(AuthenticationError("the token is not one of this coordinator's"))
    refusal = error_of(Ended(status, trailers))
    assert not ends(welcomed(connection()), refusal)
    assert ends(connection(), refusal), "who has not joined is told of a wrong token at once"


@pytest.mark.parametrize(
    "decision",
    [
        VersionMismatchError("speaks protocol 2"),
        PermissionDeniedError("is of another job"),
        ConfigError("the name is another's", retryable=True),
    ],
)
def test_a_decision_of_the_coordinator_ends_a_session(decision: FerroError) -> None:
    status, _, trailers = to_status(decision)
    refusal = error_of(Ended(status, trailers))
    assert ends(welcomed(connection()), refusal)
    assert ends(connection(), refusal) != decision.retryable, "who has not joined asks again where that may help"


@pytest.mark.parametrize(
    ("failure", "seconds"),
    [(CoordinatorUnavailableError("nobody there"), 1.0), (ConfigError("the name is another's", retryable=True), 60.0)],
)
def test_a_refusal_that_may_pass_is_no_outage(failure: FerroError, seconds: float) -> None:
    """As for the name of a process that died together with the coordinator, which waits for it some seconds."""
    clock = ManualClock()
    joining = connection(clock, join_timeout=60.0)
    joining._went_down(failure)
    clock.advance(seconds - 0.5)
    joining._give_up_after_outage()
    assert joining.ended_by is None
    clock.advance(1.0)
    joining._give_up_after_outage()
    assert isinstance(joining.ended_by, type(failure))


@pytest.mark.parametrize(
    ("thread", "work", "what"),
    [("_read", "_stay_connected", "reads from"), ("_send_heartbeats", "_keep_lease", "sends heartbeats to")],
)
def test_a_thread_that_fails_ends_the_connection_at_once(
    thread: str, work: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody reads answers, or the lease runs out and the others hear that this rank is dead."""
    up = welcomed(connection(ManualClock()))
    request, causes = up.post("a get", store=A_SET), list[FerroError]()
    monkeypatch.setattr(up, work, lambda: 1 / 0)
    monkeypatch.setattr(up._listener, "session_ended", causes.append)
    with pytest.raises(ZeroDivisionError):
        getattr(up, thread)()
    assert f"the thread that {what} nowhere:1 failed" in causes[0].message
    assert up.ended_by is request.outcome is causes[0]
