"""A member's connection to its coordinator: reconnects when its stream breaks, gives up after `max_outage` seconds.

    starting ──Welcome──> up <──Welcome, resumed──> down ──max_outage──> ended
                           └──────fenced, refused, closed───────────────> ended

It has two daemon threads. One reads the stream, and reconnects with backoff when it ends; the other sends heartbeats. Callers
add requests and wait. They go on waiting during an outage, because losing the coordinator alone is no error.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from ferrorpc.coordination.channel import ChannelFactory
from ferrorpc.coordination.condition import Condition
from ferrorpc.coordination.journal_errors import journal_lost, journal_older
from ferrorpc.coordination.outages import Outages
from ferrorpc.coordination.pending_requests import PendingRequests, Request, check_size
from ferrorpc.coordination.session_stream import SessionStream
from ferrorpc.coordination.wait_log import WaitLog
from ferrorpc.errors import CoordinatorUnavailableError, ErrorCode, FerroError, UsageError
from ferrorpc.generation_errors import used_in_child
from ferrorpc.guard import Clock, Latch
from ferrorpc.logs import tell
from ferrorpc.v1 import identity_pb2, session_pb2 as wire
from ferrorpc.wire.error_detail import restore

BACKOFF_FIRST_SECONDS: Final = 0.1
BACKOFF_MAX_SECONDS: Final = 1.0
RESUME_JITTER_SECONDS: Final = 0.2
"""Keeps the members of a large job from reconnecting to a restarted coordinator all at once."""
_RANDOM: Final = random.Random()
"""Not the global generator, which the user may have seeded alike on all ranks."""
REPLY_MARGIN_SECONDS: Final = 3.0
"""The coordinator answers a wait at its deadline, with all it knows. The client gives up this much later."""
UNANSWERED_HINT: Final = (
    "look at the coordinator's log, as its journal's disk may be stuck, and at the warnings above, as the network may lose "
    "large packets; a write may have been carried out, or still be"
)
WELCOME_SECONDS: Final = 10.0
"""A stream that has had no Welcome for so long is closed and replaced: its first frames may be lost."""
UNWELCOME_HINT: Final = "look at the coordinator's log, as its journal's disk may be stuck; or the network loses large packets"
_CONNECTION_CODES: Final = (ErrorCode.COORDINATOR_UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.CODEC)
"""Codes of a broken connection. All others are decisions of the coordinator."""
_log = logging.getLogger("ferrorpc.coordination")


class Listener(Protocol):
    """The owner of a connection. All but `explain`, `beat` and `session_ended` run on the reading thread alone. Only `hello`
    may block there."""

    def hello(self, resume_token: str) -> wire.Hello:
        """The first frame of a stream. Raises FerroError, as if the stream had ended with it."""

    def beat(self) -> wire.Beat:
        """The next heartbeat."""

    def welcomed(self) -> None:
        """A stream is up; requests are sent (again) after this call. Events of earlier streams may be out of date."""

    def result(self, position: identity_pb2.Position, result: wire.Result) -> None:
        """An answer. The caller who waits for it sees it after this call."""

    def event(self, event: wire.Event) -> None:
        """An event that the coordinator pushed."""

    def session_ended(self, cause: FerroError) -> None:
        """The coordinator does not know this session any more, so the generation is over for this member."""

    def explain(self, request: Request, stream: SessionStream | None) -> str:
        """What a request waits for, and for whom. Called on the waiting thread; may block."""


class Connection:
    """A connection that outlives its streams.

    Args:
        connect: makes a channel to the coordinator.
        listener: the owner.
        join_timeout, max_outage: as for `Outages`.
        heartbeat_interval: seconds between heartbeats, unless the coordinator wants them more often.
    """

    def __init__(
        self,
        connect: ChannelFactory,
        listener: Listener,
        clock: Clock,
        *,
        join_timeout: float,
        max_outage: float,
        heartbeat_interval: float,
    ) -> None:
        self.address = connect.address
        self.cluster_id = ""
        self._last_position = identity_pb2.Position()
        """The newest generation and revision that the coordinator sent. They are durable: the same journal never goes back."""
        self.ended_by: FerroError | None = None
        """Why the connection has ended; None while it is up or reconnects."""
        self.leave_error: FerroError | None = None
        """Set before a Leave is sent. After that the end of the stream is no loss, and the answer ends the connection."""
        self._connect = connect
        self._listener = listener
        self._clock = clock
        self._condition = Condition(clock)
        self._requests = PendingRequests()
        self.memory = Latch()
        """What the coordinator knows of this job: trips when it has lost that, and is made anew with the next generation."""
        self._token = ""
        self._stream: SessionStream | None = None
        self._opened_at = clock.now()
        self._greeted = False
        """This stream's Hello is sent, so heartbeats may follow. Its Welcome may wait long, for the coordinator's disk."""
        self._outages = Outages(connect.address, clock, join_timeout, max_outage)
        self._interval = heartbeat_interval
        self._reader = 0
        """The reading thread's identifier; 0 before and after its life."""
        self._reader_parker = clock.parker()
        self._heartbeat_parker = clock.parker()

    def start(self) -> None:
        """Starts both threads."""
        self._clock.start(self._read, "ferrorpc-session")
        self._clock.start(self._send_heartbeats, "ferrorpc-beat")

    def joined(self) -> None:
        """This member has a generation to lose, so from now on it waits up to `max_outage` for the coordinator."""
        self._outages.joined()
        with self._condition.lock:
            self._requests.drop_volatile()
        if self.memory.cause is not None:
            self.memory = Latch()

    # -- what callers do -----------------------------------------------------------------------------------------------

    def post(self, label: str, latch: Latch | None = None, **body: Any) -> Request:
        """Sends a request, now or once the connection is up again. Never blocks.

        Raises:
            MessageTooLargeError: it is larger than the coordinator takes; nothing was sent.
            FerroError: the connection has ended.
        """
        request = Request(wire.ClientFrame(**body), label, latch)
        self._post(request)
        return request

    def _post(self, request: Request) -> None:
        check_size(request)
        with self._condition.lock:
            if self.ended_by is not None:  # close() has failed the waiting requests, and fails no later one
                raise self.ended_by.again()
            self._requests.add(request, self._outages.uptime())
            if self._outages.is_up:
                self._send(request.frame)

    def ask(
        self, label: str, seconds: float, timeout_error: Callable[..., FerroError], latch: Latch | None = None, **body: Any
    ) -> Any:
        """Sends a request and waits for its answer, which the coordinator gives within `seconds`, outages apart.

        Args:
            timeout_error: makes the error of a coordinator that does not answer, from `message`, `hint` and `retryable`.

        Raises:
            FerroError: the coordinator's answer, `latch`'s cause, the error that ended the connection, or `timeout_error`.
            UsageError: this is the reading thread, which would wait for itself.
        """
        if threading.get_ident() == self._reader:
            raise UsageError(
                f"{label} on the thread that reads what the coordinator sends, as by a handler of its log lines",
                hint="let such a handler put its records into a queue (logging.handlers.QueueHandler)",
            )
        request = Request(wire.ClientFrame(**body), label, latch)
        try:
            self._post(request)
            return self._answer_of(request, seconds, timeout_error)
        finally:
            if request.answer is None:  # its caller has raised: after an outage it must not be sent (again)
                self._drop(request)

    def _answer_of(self, request: Request, seconds: float, timeout_error: Callable[..., FerroError]) -> Any:
        """As `ask`, for a request that was posted."""
        label, wait_log = request.label, WaitLog(self._clock.now())
        while True:
            until, explain_at = self._give_up_at(request, seconds), wait_log.due
            outcome, now = self._wait(request, min(until, explain_at)), self._clock.now()
            if outcome is None and now >= self._give_up_at(request, seconds):
                waited = seconds + REPLY_MARGIN_SECONDS
                text = f"{label}: the coordinator at {self.address} has not answered for {waited:.4g} s"
                outcome = self._drop(request) or timeout_error(message=text, hint=UNANSWERED_HINT, retryable=True)
            if isinstance(outcome, FerroError):
                raise outcome.again()
            if outcome is not None:
                return outcome
            if now >= explain_at:
                wait_log.say(request.label, now, self.outage() or self._listener.explain(request, self._stream))

    def try_ask(self, label: str, seconds: float, *, while_up: float = 0.0, **body: Any) -> Any:
        """The answer, or None if none comes within `seconds`, for whatever reason. While the connection is up, it is waited for
        longer: `while_up` seconds."""
        try:
            request = self.post(label, **body)
        except FerroError:
            return None
        began = self._clock.now()
        self._wait(request, began + seconds)
        self._condition.wait_for(lambda: request.outcome is not None or not self._outages.is_up or None, began + while_up)
        outcome = self._drop(request)
        return None if isinstance(outcome, FerroError) else outcome

    def wait_until_up(self, label: str, until: float) -> None:
        """Returns once the connection is up or has ended, or at clock time `until`. Logs meanwhile what `label` waits for.

        It ends the connection if the outage has lasted too long by then: the reading thread sees that only between two
        attempts, and one that nobody answers takes gRPC some seconds.
        """
        wait_log = WaitLog(self._clock.now())

        def settled() -> bool | None:
            return True if self._outages.is_up or self.ended_by is not None else None

        while self._condition.wait_for(settled, min(until, wait_log.due)) is None:
            now, why = self._clock.now(), self.outage()
            if now >= until:
                error = self._outages.final_error(has_session=bool(self._token))
                if error is not None:
                    self._fail(error)
                return
            if why:
                wait_log.say(label, now, why)

    def wait_for_end(self, until: float) -> None:
        """Returns once the connection has ended, or at clock time `until`."""
        self._condition.wait_for(lambda: self.ended_by, until)

    def outage(self) -> str:
        """Why the connection is down; empty while it is up."""
        return self._outages.describe()

    def wake(self) -> None:
        """Wakes all waiting callers, because a latch has tripped."""
        with self._condition.lock:
            self._condition.notify_all()

    def close(self, error: FerroError) -> None:
        """Ends the connection; waiting callers raise `error`. Idempotent: the first error stays."""
        with self._condition.lock:
            if self.ended_by is not None:
                return
            self.ended_by = error
            stream = self._stream
            self._requests.fail(error, lambda _: True)
            self._condition.notify_all()
        if stream is not None:
            stream.close()
        self._reader_parker.unpark()
        self._heartbeat_parker.unpark()

    def abandon_in_child(self) -> None:
        """In a forked child: leaves the parent's connection alone and makes every use of this copy an error."""
        _kept_after_fork.append((self._condition, self._stream, self._connect))
        self._condition = Condition(self._clock)
        self._stream = None
        self.ended_by = used_in_child()

    def _wait(self, request: Request, until: float) -> Message | FerroError | None:
        self._condition.wait_for(lambda: True if request.outcome is not None else None, until)
        return request.outcome

    def _drop(self, request: Request) -> Message | FerroError | None:
        """Forgets a request that nobody waits for any more. An answer that has just come counts."""
        with self._condition.lock:
            self._requests.drop(request)
            return request.outcome

    def _give_up_at(self, request: Request, seconds: float) -> float:
        """Clock time until which a request waits. Its time does not run during an outage, but goes on after it: where large
        packets are lost, streams come up and break again for ever."""
        with self._condition.lock:
            if not self._outages.is_up:
                return self._clock.now() + BACKOFF_MAX_SECONDS
            return self._clock.now() + request.began + seconds + REPLY_MARGIN_SECONDS - self._outages.uptime()

    def _send(self, frame: wire.ClientFrame) -> None:
        assert self._stream is not None
        if self.leave_error is not None:  # it leaves: what it did since the last heartbeat is told before that
            self._stream.send(wire.ClientFrame(beat=self._listener.beat()))
        self._stream.send(frame)

    # -- the reading thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self._reader = threading.get_ident()
        try:
            self._stay_connected()
        finally:
            try:
                if self.ended_by is None:  # a bug: the thread prints its traceback, and waiting callers must not hang
                    self._fail(FerroError(f"the thread that reads from {self.address} failed"))
            finally:
                self._reader = 0  # another thread may get its identifier

    def _stay_connected(self) -> None:
        delay = BACKOFF_FIRST_SECONDS
        while self.ended_by is None:
            was_up = self._run_stream()
            if self.ended_by is not None:
                return
            self._give_up_after_outage()
            if was_up:
                delay = BACKOFF_FIRST_SECONDS
            pause = _RANDOM.uniform(0.0, RESUME_JITTER_SECONDS) if was_up else delay * _RANDOM.uniform(0.5, 1.0)
            self._reader_parker.park(self._clock.now() + pause)
            delay = min(delay * 2, BACKOFF_MAX_SECONDS)

    def _run_stream(self) -> bool:
        """Opens a stream and reads it to its end. Returns whether it came up."""
        try:
            stream = SessionStream(self._connect)
        except FerroError as error:
            if not self._token:
                self._fail(error)
            return self._went_down(error)  # a later certificate may be accepted
        with self._condition.lock:
            self._stream, self._opened_at = stream, self._clock.now()
        try:
            if self.ended_by is not None:
                return False
            stream.send(wire.ClientFrame(hello=self._listener.hello(self._token)))
            self._greeted = True
            for frame in stream.frames():
                self._handle_frame(frame)
            failure: FerroError = CoordinatorUnavailableError(f"the coordinator at {self.address} ended the stream")
        except FerroError as error:
            failure = self._diagnosed(error)
            if self._is_final(failure):
                self._fail(failure)
        finally:
            stream.close()
        return self._went_down(failure)

    def _diagnosed(self, error: FerroError) -> FerroError:
        """The error, or the TLS problem behind it if no stream has come up yet.

        A coordinator's decisions are errors of ferrorpc. So a bare status of gRPC tells a member that a proxy, or another
        server, has answered while its coordinator is away.
        """
        if self._token and "grpc_status" in error.fields:
            return CoordinatorUnavailableError(error.message, **error.fields)
        if self._token or not isinstance(error, CoordinatorUnavailableError):
            return error
        return self._connect.diagnose() or error

    def _went_down(self, failure: FerroError) -> bool:
        """Notes that the stream has ended or could not be opened. Returns whether it was up."""
        with self._condition.lock:
            was_up, self._greeted = self._outages.is_up, False
            warning = self._outages.begin(failure, self.ended_by is not None or self.leave_error is not None)
            self._condition.notify_all()
        if warning:  # without the lock, which a log handler that ends the generation needs
            tell(_log, logging.WARNING, "%s", warning)
        return was_up

    def _handle_frame(self, frame: wire.ServerFrame) -> None:
        body = frame.WhichOneof("body")
        if body == "welcome":
            self._handle_welcome(frame.position, frame.welcome)
        elif body == "result":
            self._handle_result(frame.position, frame.result)
        elif body == "event" and frame.event.WhichOneof("kind") == "fenced":
            if self._token and frame.position.cluster_id != self.cluster_id:
                cluster_id = frame.position.cluster_id
                self._forget_session(journal_lost(self.address, self.cluster_id, cluster_id), cluster_id)
            raise restore(frame.event.fenced)
        elif body == "event":
            self._listener.event(frame.event)
        self._last_position.generation = max(self._last_position.generation, frame.position.generation)
        self._last_position.revision = max(self._last_position.revision, frame.position.revision)

    def _handle_welcome(self, position: identity_pb2.Position, welcome: wire.Welcome) -> None:
        same = position.revision >= self._last_position.revision and position.generation >= self._last_position.generation
        if self._token and not same:
            self._forget_session(journal_older(self.address, self._last_position, position), position.cluster_id)
        self._listener.welcomed()
        warning = ""
        with self._condition.lock:
            self._token, self.cluster_id = welcome.resume_token, position.cluster_id
            if welcome.heartbeat_interval_ms:
                self._interval = min(self._interval, welcome.heartbeat_interval_ms / 1000)
            if self.ended_by is None:
                warning = self._outages.end()
                for request in self._requests.to_send():
                    self._send(request.frame_after(self._outages.uptime() - request.began))
            self._condition.notify_all()
        session = "the session goes on" if welcome.resumed and same else "this is a new session"
        if warning:
            tell(_log, logging.WARNING, "%s: %s", warning, session)
        else:
            tell(_log, logging.INFO, "the coordinator at %s answered: %s", self.address, session)
        self._heartbeat_parker.unpark()

    def _forget_session(self, why: FerroError, cluster_id: str) -> None:
        """The coordinator lost this session or part of its state: ends the generation and the requests that belong to it."""
        with self._condition.lock:
            self._token, self.cluster_id = "", cluster_id
        self._last_position = identity_pb2.Position()
        self.memory.trip(why)
        self._listener.session_ended(why)
        with self._condition.lock:
            self._requests.fail(why, lambda request: request.latch is not None)
            self._condition.notify_all()

    def _handle_result(self, position: identity_pb2.Position, result: wire.Result) -> None:
        if not result.sequence and result.HasField("error"):
            raise restore(result.error)
        self._listener.result(position, result)
        kind = result.WhichOneof("outcome")
        answer = restore(result.error) if kind == "error" else getattr(result, kind or "report")
        with self._condition.lock:
            self._requests.complete(result.sequence, answer)
            self._condition.notify_all()
        if kind == "leave" and self.leave_error is not None:
            self.close(self.leave_error)  # a new stream would be refused as that of a member that left

    def _is_final(self, error: FerroError) -> bool:
        """Whether reconnecting is pointless: the coordinator refuses a member that it knows, or refuses for good."""
        if error.code in _CONNECTION_CODES or (self._token and error.code is ErrorCode.AUTHENTICATION):
            return False  # the latter passes where one side has not read its new token file yet
        return bool(self._token) or not error.retryable

    def _give_up_after_outage(self) -> None:
        error = self._outages.final_error(has_session=bool(self._token))
        if self._token and isinstance(error, CoordinatorUnavailableError):  # without a session `_diagnosed` has asked already
            error = self._connect.diagnose() or error
        if error is not None:
            self._fail(error)

    def _fail(self, error: FerroError) -> None:
        self._listener.session_ended(error)  # first, so that a caller that sees the end finds the generation broken, too
        self.close(error)

    # -- the heartbeat thread ------------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        try:
            self._keep_lease()
        finally:
            if self.ended_by is None:  # a bug: the thread prints its traceback, and nobody must wait for the lease to run out
                self._fail(FerroError(f"the thread that sends heartbeats to {self.address} failed"))

    def _keep_lease(self) -> None:
        while self.ended_by is None:
            unanswered = None
            with self._condition.lock:
                if self._stream is not None and self._greeted:
                    self._stream.send(wire.ClientFrame(beat=self._listener.beat()))
                if not self._outages.is_up and self._clock.now() >= self._opened_at + WELCOME_SECONDS:
                    unanswered = self._stream
            if unanswered is not None:  # the reading thread sees the end and reconnects
                text = f"the coordinator at {self.address} took the call, but has sent no Welcome for {WELCOME_SECONDS:g} s"
                unanswered.close(CoordinatorUnavailableError(text, hint=UNWELCOME_HINT))
            due = self._clock.now() + self._interval
            self._heartbeat_parker.park(due)
            with self._condition.lock:  # while this process stands still, a Welcome may have come that nobody has read
                self._opened_at += max(0.0, self._clock.now() - due)


_kept_after_fork: list[object] = []
"""The parent's connections in a forked child. Kept, because finalising them would touch the parent's sockets."""
