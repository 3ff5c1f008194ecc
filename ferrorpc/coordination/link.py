"""The line from a member to its coordinator: kept up, resumed when it breaks, given up after `max_outage` seconds.

    starting ──Welcome──> up <──Welcome, resumed──> away ──max_outage──> over
                           └──────fenced, refused, closed───────────────> over

Two daemon threads. One reads the stream, and dials again with backoff when it ends; the other beats. Callers add requests
and wait; while the coordinator is away they go on waiting, because losing it alone is no error.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from ferrorpc.coordination.monitor import Monitor
from ferrorpc.coordination.requests import Request, Requests, check_size
from ferrorpc.coordination.stream import Connect, Stream
from ferrorpc.errors import CoordinatorUnavailableError, ErrorCode, FerroError, StaleGenerationError, UsageError
from ferrorpc.guard import Clock, Latch
from ferrorpc.v1 import identity_pb2, session_pb2 as wire
from ferrorpc.wire.error_detail import restore

BACKOFF_FIRST_SECONDS: Final = 0.1
BACKOFF_MOST_SECONDS: Final = 1.0
RESUME_JITTER_SECONDS: Final = 0.2
"""So that the members of a large job do not all dial a coordinator that restarts in the same instant."""
_JITTER: Final = random.Random()
"""Not the global generator: that is the user's, who may have seeded it alike on all ranks."""
ANSWER_MARGIN_SECONDS: Final = 3.0
"""The coordinator ends a wait at its deadline, with all it knows. The client gives up this much later."""
WELCOME_SECONDS: Final = 10.0
"""A stream on which no Welcome has come for so long is given up, and another one dialled: its first frames may be lost."""
EXPLAIN_FIRST_SECONDS: Final = 5.0
EXPLAIN_FACTOR: Final = 3.0
_OF_THE_CONNECTION: Final = (ErrorCode.COORDINATOR_UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.CODEC)
"""Codes that tell of a broken connection, not of a coordinator's decision."""
_log = logging.getLogger("ferrorpc.coordination")


class Listener(Protocol):
    """Whose line it is. All but `explain` are called on the reading thread and must not block."""

    def hello(self, resume_token: str) -> wire.Hello:
        """The first frame of a stream."""

    def beat(self) -> wire.Beat:
        """What this member does now."""

    def welcomed(self) -> None:
        """A stream is up, before what is unanswered is sent on it: what was pushed on an earlier one may hold no more."""

    def result(self, position: identity_pb2.Position, result: wire.Result) -> None:
        """An answer, before the one who waits for it sees it."""

    def event(self, event: wire.Event) -> None:
        """What the coordinator pushes."""

    def session_ended(self, cause: FerroError) -> None:
        """The coordinator no longer knows this session: the generation is over for this member."""

    def explain(self, request: Request, stream: Stream | None) -> str:
        """What a request waits for, and on whom."""


class Link:
    """The line.

    Args:
        address: of the coordinator, for messages.
        connect: makes a channel to it.
        listener: whose line it is.
        patience: seconds the coordinator may be away until `seated` is called.
        max_outage: seconds it may be away later.
        heartbeat_interval: seconds between beats, unless the coordinator wants them more often.
    """

    def __init__(
        self,
        address: str,
        connect: Connect,
        listener: Listener,
        clock: Clock,
        *,
        patience: float,
        max_outage: float,
        heartbeat_interval: float,
    ) -> None:
        self.address = address
        self.cluster_id = ""
        self._told = identity_pb2.Position()
        """The most that the coordinator told of itself: what is durable, so the same journal never tells less."""
        self.over: FerroError | None = None
        self.leaving: FerroError | None = None
        """A goodbye is on its way: the end of the stream is then no loss, and the line is over when the coordinator has it."""
        self._connect = connect
        self._listener = listener
        self._clock = clock
        self._monitor = Monitor(clock)
        self._requests = Requests()
        self._token = ""
        self._stream: Stream | None = None
        self._dialled_at = clock.now()
        self._away_since: float | None = clock.now()
        self._missed = False
        """Its loss was logged, so its return is logged as loudly."""
        self._failure: FerroError = CoordinatorUnavailableError(f"nobody has answered at {address} yet")
        self._outage_most = patience
        self._max_outage = max_outage
        self._interval = heartbeat_interval
        self._reader = clock.parker()
        self._beater = clock.parker()

    def start(self) -> None:
        """Starts both threads."""
        self._clock.start(self._read, "ferrorpc-session")
        self._clock.start(self._beat, "ferrorpc-beat")

    def seated(self) -> None:
        """There is a generation to lose, which is worth a longer wait for the coordinator than joining one."""
        self._outage_most = self._max_outage

    # -- what callers do -----------------------------------------------------------------------------------------------

    def post(self, label: str, latch: Latch | None = None, **body: Any) -> Request:
        """Sends a request, now or when the line is up again. Never blocks.

        Raises:
            MessageTooLargeError: it is larger than the coordinator takes; nothing was sent.
            FerroError: the line is over.
        """
        check_size(label, **body)
        with self._monitor.lock:
            if self.over is not None:  # what waits has been told so, and nobody tells what comes later
                raise self.over.again()
            request = self._requests.add(label, latch, **body)
            if self._away_since is None:
                self._send(request)
        return request

    def ask(
        self, label: str, seconds: float, late: Callable[[str], FerroError], latch: Latch | None = None, **body: Any
    ) -> Any:
        """Sends a request and waits for its answer, which the coordinator gives within `seconds`.

        Args:
            late: makes the error for a coordinator that is there but does not answer, from a sentence.

        Raises:
            FerroError: what the coordinator answered; `latch`'s cause; what ended the line; or `late`.
        """
        request = self.post(label, latch, **body)
        explanations = _Explanations(self._clock.now())
        while True:
            until, explain_at = self._patience(request, seconds), explanations.due
            verdict, now = self._wait(request, min(until, explain_at)), self._clock.now()
            if verdict is None and now >= self._patience(request, seconds):
                waited = seconds + ANSWER_MARGIN_SECONDS
                text = f"{label}: the coordinator at {self.address} has not answered for {waited:g} s"
                verdict = self._drop(request) or late(text)
            if isinstance(verdict, FerroError):
                raise verdict.again()
            if verdict is not None:
                return verdict
            if now >= explain_at:
                explanations.say(request.label, now, self.standing() or self._listener.explain(request, self._stream))

    def try_ask(self, label: str, seconds: float, **body: Any) -> Any:
        """The answer, or None when there is none within `seconds`, for whatever reason. For what serves messages only."""
        try:
            request = self.post(label, **body)
        except FerroError:
            return None
        self._wait(request, self._clock.now() + seconds)
        verdict = self._drop(request)
        return None if isinstance(verdict, FerroError) else verdict

    def come_up(self, label: str, until: float) -> None:
        """Returns when the line is up, or over, or at clock time `until`. Meanwhile the log says what `label` waits for."""
        explanations = _Explanations(self._clock.now())

        def decided() -> bool | None:
            return True if self._away_since is None or self.over is not None else None

        while self._monitor.wait(decided, min(until, explanations.due)) is None:
            now, why = self._clock.now(), self.standing()
            if now >= until:
                return
            if why:
                explanations.say(label, now, why)

    def standing(self) -> str:
        """What is wrong with the line; empty while it is up."""
        away_since = self._away_since
        if away_since is None:
            return ""
        seconds, failure = self._clock.now() - away_since, self._failure
        if isinstance(failure, CoordinatorUnavailableError):
            return f"no coordinator at {self.address} for {seconds:.1f} s ({failure.message})"
        return f"the coordinator at {self.address} refuses this process ({failure.message})"

    def wake(self) -> None:
        """Those who wait look again, because a latch has tripped."""
        with self._monitor.lock:
            self._monitor.changed()

    def close(self, error: FerroError) -> None:
        """The line is over; whoever waits raises `error`. Idempotent: the first error stays."""
        with self._monitor.lock:
            if self.over is not None:
                return
            self.over = error
            stream = self._stream
            self._requests.fail(error, lambda _: True)
            self._monitor.changed()
        if stream is not None:
            stream.close()
        self._reader.unpark()
        self._beater.unpark()

    def abandon_in_child(self) -> None:
        """In a forked child: nothing of the parent's line is touched, every use of it is an error."""
        _inherited.append((self._monitor, self._stream, self._connect))
        self._monitor = Monitor(self._clock)
        self._stream = None
        self.over = UsageError(
            f"this process ({os.getpid()}) was forked from a member; a session does not survive a fork",
            hint="start worker processes that are to be members with the spawn method",
        )

    def _wait(self, request: Request, until: float) -> Message | FerroError | None:
        self._monitor.wait(lambda: True if request.verdict is not None else None, until)
        return request.verdict

    def _drop(self, request: Request) -> Message | FerroError | None:
        """Nobody waits for it any more; what has come in the last moment counts."""
        with self._monitor.lock:
            self._requests.drop(request)
            return request.verdict

    def _patience(self, request: Request, seconds: float) -> float:
        """Until when a request waits: while the coordinator is away, its time stands still."""
        with self._monitor.lock:  # once the line is up again, it has been sent again, too
            if self._away_since is not None or request.sent_at is None:
                return self._clock.now() + BACKOFF_MOST_SECONDS
            return request.sent_at + seconds + ANSWER_MARGIN_SECONDS

    def _send(self, request: Request) -> None:
        assert self._stream is not None
        request.sent_at = self._clock.now()
        self._stream.send(request.frame)

    # -- the reading thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._keep_up()
        finally:
            if self.over is None:  # a bug, whose traceback the thread prints: nobody may wait for this thread any more
                self._finish(FerroError(f"the thread that reads from {self.address} failed"))

    def _keep_up(self) -> None:
        delay = BACKOFF_FIRST_SECONDS
        while self.over is None:
            was_up = self._attempt()
            if self.over is not None:
                return
            self._give_up_after_outage()
            if was_up:
                delay = BACKOFF_FIRST_SECONDS
            pause = _JITTER.uniform(0.0, RESUME_JITTER_SECONDS) if was_up else delay * _JITTER.uniform(0.5, 1.0)
            self._reader.park(self._clock.now() + pause)
            delay = min(delay * 2, BACKOFF_MOST_SECONDS)

    def _attempt(self) -> bool:
        """One stream, from dialling to its end. Returns whether it came up."""
        try:
            stream = Stream(self._connect, f"the coordinator at {self.address}")
        except FerroError as error:
            if not self._token:
                self._finish(error)
            return self._came_down(error)  # a certificate may be renewed yet
        with self._monitor.lock:
            self._stream, self._dialled_at = stream, self._clock.now()
        try:
            if self.over is not None:
                return False
            stream.send(wire.ClientFrame(hello=self._listener.hello(self._token)))
            for frame in stream.frames():
                self._received(frame)
            failure: FerroError = CoordinatorUnavailableError(f"the coordinator at {self.address} ended the stream")
        except FerroError as error:
            failure = self._explained(error)
            if self._is_final(failure):
                self._finish(failure)
        finally:
            stream.close()
        return self._came_down(failure)

    def _explained(self, error: FerroError) -> FerroError:
        """The error, or what is behind it where no stream has come up yet."""
        if self._token or not isinstance(error, CoordinatorUnavailableError):
            return error
        return self._connect.diagnose() or error

    def _came_down(self, failure: FerroError) -> bool:
        """The stream has ended, or never began. Returns whether there was one."""
        with self._monitor.lock:
            was_up = self._away_since is None
            if was_up:
                self._away_since = self._clock.now()
                if self.over is None and self.leaving is None:
                    self._missed = True
                    _log.warning("lost the coordinator at %s: %s", self.address, failure.message)
            self._failure = failure
            self._monitor.changed()
        return was_up

    def _received(self, frame: wire.ServerFrame) -> None:
        body = frame.WhichOneof("body")
        if body == "welcome":
            self._welcome(frame.position, frame.welcome)
            self._told.CopyFrom(frame.position)
        elif body == "result":
            self._answer(frame.position, frame.result)
            self._note(frame.position)
        elif body == "event" and frame.event.WhichOneof("kind") == "fenced":
            if self._token and frame.position.cluster_id != self.cluster_id:
                cluster_id = frame.position.cluster_id
                self._start_anew(_forgotten(self.address, self.cluster_id, cluster_id), cluster_id)
            raise restore(frame.event.fenced)
        elif body == "event":
            self._listener.event(frame.event)
            self._note(frame.position)

    def _note(self, position: identity_pb2.Position) -> None:
        self._told.generation = max(self._told.generation, position.generation)
        self._told.revision = max(self._told.revision, position.revision)

    def _welcome(self, position: identity_pb2.Position, welcome: wire.Welcome) -> None:
        same = position.revision >= self._told.revision and position.generation >= self._told.generation
        if self._token and not same:
            self._start_anew(_taken_back(self.address, self._told, position), position.cluster_id)
        self._listener.welcomed()
        away_since = self._away_since
        with self._monitor.lock:
            self._token, self.cluster_id = welcome.resume_token, position.cluster_id
            if welcome.heartbeat_interval_ms:
                self._interval = min(self._interval, welcome.heartbeat_interval_ms / 1000)
            if self.over is None:
                self._away_since = None
                for request in self._requests.unanswered():
                    self._send(request)
            self._monitor.changed()
        session = "the session goes on" if welcome.resumed and same else "this is a new session"
        if self._missed and away_since is not None:
            self._missed = False
            _log.warning(
                "the coordinator at %s is back after %.1f s: %s", self.address, self._clock.now() - away_since, session
            )
        else:
            _log.info("the coordinator at %s answered: %s", self.address, session)
        self._beater.unpark()

    def _start_anew(self, why: FerroError, cluster_id: str) -> None:
        """The coordinator does not know this session, or not as it was: the generation is over, only a new one will do."""
        with self._monitor.lock:
            self._token, self.cluster_id = "", cluster_id
        self._listener.session_ended(why)
        with self._monitor.lock:
            self._requests.fail(why, lambda request: request.latch is not None)
            self._monitor.changed()

    def _answer(self, position: identity_pb2.Position, result: wire.Result) -> None:
        if not result.sequence and result.HasField("error"):
            raise restore(result.error)
        self._listener.result(position, result)
        kind = result.WhichOneof("outcome")
        outcome = restore(result.error) if kind == "error" else getattr(result, kind or "report")
        with self._monitor.lock:
            self._requests.settle(result.sequence, outcome)
            self._monitor.changed()
        if kind == "leave" and self.leaving is not None:
            self.close(self.leaving)  # dialled again, it would be refused as one that has left

    def _is_final(self, error: FerroError) -> bool:
        """Whether dialling again is pointless: the coordinator knows this member and refuses it, or always will."""
        if error.code in _OF_THE_CONNECTION:
            return False
        return bool(self._token) or not error.retryable

    def _give_up_after_outage(self) -> None:
        away_since = self._away_since
        if away_since is None or self._clock.now() - away_since < self._outage_most:
            return
        if not isinstance(self._failure, CoordinatorUnavailableError):
            self._finish(self._failure)
            return
        seconds, last = self._outage_most, self._failure.message
        self._finish(
            CoordinatorUnavailableError(f"nobody answered at {self.address} for {seconds:g} s; the last attempt: {last}")
        )

    def _finish(self, error: FerroError) -> None:
        self._listener.session_ended(error)  # first: who is told of the end finds the generation broken, too
        self.close(error)

    # -- the beating thread --------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while self.over is None:
            unanswered = None
            with self._monitor.lock:
                if self._stream is not None and self._away_since is None:
                    self._stream.send(wire.ClientFrame(beat=self._listener.beat()))
                elif self._clock.now() >= self._dialled_at + WELCOME_SECONDS:
                    unanswered = self._stream
            if unanswered is not None:
                unanswered.close()  # the reading thread sees it end, and dials again
            self._beater.park(self._clock.now() + self._interval)


class _Explanations:
    """When a wait is explained: after 5 s, then three times as late each time."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._after = EXPLAIN_FIRST_SECONDS

    @property
    def due(self) -> float:
        return self._started + self._after

    def say(self, label: str, now: float, why: str) -> None:
        self._after *= EXPLAIN_FACTOR
        _log.warning("%s has waited for %.1f s: %s", label, now - self._started, why)


_inherited: list[object] = []
"""What a forked child got from its parent's sessions: kept, because finalising it would touch the parent's sockets."""


def _forgotten(address: str, before: str, now: str) -> StaleGenerationError:
    message = f"the coordinator at {address} restarted without its journal: cluster {before} is gone, this is cluster {now}"
    hint = "give the coordinator a --data-dir, so that a restart keeps its jobs; group.reform() starts anew"
    return StaleGenerationError(message, hint=hint)


def _taken_back(address: str, told: identity_pb2.Position, now: identity_pb2.Position) -> StaleGenerationError:
    message = (
        f"the coordinator at {address} came back with an older journal: it is in generation {now.generation} at revision "
        f"{now.revision}, after it had told this member of generation {told.generation} and revision {told.revision}"
    )
    hint = "start it on its newest data directory, or an empty one; group.reform() goes on with what the older one holds"
    return StaleGenerationError(message, hint=hint)
