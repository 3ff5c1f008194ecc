"""The driver: owns the clock, steps the state machine, and carries out its effects.

    gRPC frame, call, end of stream --> event --> Coordinator.step(event, now) --> effects
    effects: Persist -> the group being filled;  Send, Reply, Close -> out, once durable

Nothing that a client was told may be lost. So each Send, Reply and Close waits until every Persist of its own step and earlier
ones is durable. While one group is being written the next is filled, and all rows of one turn of the event loop share a group.
Without a journal nothing waits. Nor does a status: it is a view, on which nobody builds, and is needed when the disk is stuck.

Everything here runs on one event loop, without locks and without a task per message. An exception from the state machine is a
bug that may have left memory and journal inconsistent; an exception while sending has left somebody without an answer. The
driver then stops at once (`failure`), and a restart continues from what is durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from ferrorpc.errors import CoordinatorUnavailableError, LimitExceededError
from ferrorpc.v1 import error_pb2, session_pb2
from ferrorpc_coordinator.journal import Journal
from ferrorpc_coordinator.metrics import Counters
from ferrorpc_coordinator.send_queue import SendQueue
from ferrorpc_coordinator.state.effects import Close, Effect, Note, Persist, Reply, Send, UnaryResponse
from ferrorpc_coordinator.state.events import (
    UNKNOWN_CALLER,
    Called,
    Caller,
    Cancelled,
    Connected,
    Disconnected,
    Drain,
    Event,
    JournalRemoved,
    Received,
    Tick,
    UnaryRequest,
)

_log = logging.getLogger("ferrorpc.coordinator.driver")
_job_log = logging.getLogger("ferrorpc.coordinator.job")
_ROUTINE: Final = frozenset({"generation", "ended", "left", "forgotten"})
"""Kinds of notes that are logged at level INFO, others at WARNING."""

SLOW_COMMIT_NS: Final = 5_000_000_000
"""A group that takes longer to reach the disk is logged, once: until then, everybody waits for it."""

LATE_TIMER_NS: Final = 1_000_000_000
"""A timer that fires later than this is logged, which explains what members saw meanwhile."""

Outgoing = Send | Reply | Close


class StateMachine(Protocol):
    """The state machine, as the driver uses it."""

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handles one event."""

    def next_deadline(self) -> int | None:
        """When it must get a Tick at the latest."""


class Driver:
    """Drives one coordinator on the running event loop.

    Args:
        state_machine: already recovered.
        journal: where Persist effects go; None keeps everything in memory.
        counters: the metrics that it updates.
        now_ns: the monotonic clock; replaced in tests.
    """

    def __init__(
        self,
        state_machine: StateMachine,
        journal: Journal | None,
        counters: Counters,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._state_machine = state_machine
        self._journal = journal
        self._counters = counters
        self._now_ns = now_ns
        self._queues: dict[int, SendQueue] = {}
        self._calls: dict[int, tuple[asyncio.Future[UnaryResponse | error_pb2.ErrorDetail], Callable[[int], None]]] = {}
        self._numbers = 0
        self._rows: dict[tuple[str, str], Persist] = {}
        self._written = 0
        """The last group that was passed to the journal. The next one is being filled."""
        self._durable = 0
        """The last group that is on disk."""
        self._flushed_ns = 0
        self._reported_slow = 0
        """The last group that was logged as slow."""
        self._held: deque[tuple[int, Outgoing]] = deque()
        self._settle_scheduled = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Fails when the coordinator cannot continue."""
        if journal is not None:
            journal.start(self._journal_failed)

    @property
    def refuses_writes(self) -> bool:
        """Whether the journal's disk is full, so that requests that would enlarge it must be refused."""
        return self._journal is not None and self._journal.full

    @property
    def journal_waits_ns(self) -> int:
        """For how long the journal has been writing a group, without this process's own pauses; 0 if it writes none."""
        return max(0, self._now_ns() - self._flushed_ns) if self._written > self._durable else 0

    @property
    def sessions(self) -> int:
        """The number of open streams."""
        return len(self._queues)

    def tick(self) -> None:
        """Sends a Tick: once at the start, so that what recovery decided becomes durable, and before ages are read."""
        self._step(Tick())

    def connect(self, hello: session_pb2.Hello, caller: Caller = UNKNOWN_CALLER) -> SendQueue:
        """Opens a stream for this caller, whose first frame was `hello`; returns its queue."""
        self._numbers += 1
        queue = SendQueue(self._numbers)
        if self._closed:
            queue.finish()
            return queue
        self._queues[queue.stream] = queue
        self._step(Connected(queue.stream, hello, caller))
        return queue

    def receive(self, stream: int, frame: session_pb2.ClientFrame) -> None:
        """Handles another frame of a stream."""
        self._counters.frames_received += 1
        self._counters.heartbeats += frame.HasField("beat")
        self._step(Received(stream, frame, self.refuses_writes))

    def disconnect(self, stream: int) -> None:
        """Handles the end of a stream, whoever ended it. Later frames for it are dropped."""
        if self._queues.pop(stream, None) is not None:
            self._step(Disconnected(stream))

    async def call(
        self, request: UnaryRequest, caller: Caller = UNKNOWN_CALLER, hold: Callable[[int], None] = lambda _: None
    ) -> UnaryResponse | error_pb2.ErrorDetail:
        """Handles a unary request; the answer may take long.

        Args:
            hold: called with the size of the answer, before it waits for this caller to go on; may raise.

        Raises:
            CoordinatorUnavailableError: the coordinator stops before there is an answer.
            LimitExceededError: from `hold`.
        """
        if self._closed:
            raise CoordinatorUnavailableError("the coordinator is stopping")
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[UnaryResponse | error_pb2.ErrorDetail] = self._loop.create_future()
        self._calls[number] = answer, hold
        self._step(Called(number, request, caller, self.refuses_writes))
        del request  # its memory, which may be much, for the time of the wait
        try:
            return await answer
        except asyncio.CancelledError:
            self._drop_held_reply(number)
            self._step(Cancelled(number))
            raise
        finally:
            self._calls.pop(number, None)

    def drain(self, within_ms: int) -> None:
        """Tells every session that the coordinator will stop within this many milliseconds."""
        self._step(Drain(within_ms))

    async def settled(self) -> None:
        """Returns once everything decided so far is durable and passed to the streams."""
        await self._idle.wait()

    def close(self) -> None:
        """Stops the timer, ends every stream, and fails every call, including later ones."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for queue in self._queues.values():
            queue.finish()
        for answer, _ in self._calls.values():
            if not answer.done():
                answer.set_exception(CoordinatorUnavailableError("the coordinator is stopping"))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        if self._closed:
            return
        try:
            self._carry_out(self._state_machine.step(event, self._now_ns()))
        except Exception as error:
            self._stop(error)
            raise
        if not self._settle_scheduled:
            self._settle_scheduled = True
            self._idle.clear()
            self._loop.call_soon(self._settle)

    def _carry_out(self, effects: list[Effect]) -> None:
        outgoing = self._buffer_rows(effects)
        needs = self._written + 1 if self._rows else self._written
        for effect in outgoing:
            if needs > self._durable and not _is_status(effect):
                self._held.append((needs, effect))
                self._reserve(effect, 1)
            else:
                self._release(effect)

    def _buffer_rows(self, effects: list[Effect]) -> list[Outgoing]:
        """Logs the notes and buffers the rows; returns the other effects."""
        outgoing: list[Outgoing] = []
        for effect in effects:
            if isinstance(effect, Note):
                self._counters.noted(effect)
                _log_note(effect)
            elif not isinstance(effect, Persist):
                outgoing.append(effect)
            elif self._journal is not None:
                self._rows[effect.table, effect.key] = effect
        return outgoing

    def _settle(self) -> None:
        """Once per turn of the event loop: passes a group of rows to the journal and arms the timer."""
        self._settle_scheduled = False
        self._flush()
        self._arm()

    def _arm(self) -> None:
        """Arms the timer for the next deadline. A timer that fires too early is armed again."""
        deadline_ns = self._state_machine.next_deadline()
        if deadline_ns is None or self._closed:
            return
        if self._timer is not None:
            if self._armed_ns <= deadline_ns:
                return
            self._timer.cancel()
        self._armed_ns = deadline_ns
        self._timer = self._loop.call_later(max(0, deadline_ns - self._now_ns()) / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ns = self._now_ns()
        late_ns = max(0, now_ns - self._armed_ns)
        self._counters.loop_lag.observe(late_ns / 1e9)
        if late_ns > LATE_TIMER_NS:
            _log.warning(
                "this coordinator stood still for %.1f s (suspended, or without a processor); no member is declared dead",
                late_ns / 1e9,
            )
        self._flushed_ns += late_ns
        self._report_slow_commit()
        deadline_ns = self._state_machine.next_deadline()
        if deadline_ns is not None and deadline_ns > now_ns:
            self._arm()
            return
        self._step(Tick())

    # -- durability ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Passes the rows to the journal, unless that is writing a group: they, and what is held, wait for it."""
        if self._written > self._durable:
            return
        if self._journal is None or not self._rows:
            self._idle.set()
            return
        rows = list(self._rows.values())
        self._rows.clear()
        self._written += 1
        self._flushed_ns = self._now_ns()
        self._journal.write(rows, self._journal_wrote)

    def _report_slow_commit(self) -> None:
        waited_ns = self.journal_waits_ns
        if waited_ns > SLOW_COMMIT_NS and self._written > self._reported_slow:
            self._reported_slow = self._written
            _log.error(
                "the journal's disk has been stuck for %.0f s: nothing that must be durable is answered", waited_ns / 1e9
            )

    def _journal_wrote(self) -> None:
        """Called on the journal's thread."""
        self._loop.call_soon_threadsafe(self._made_durable)

    def _journal_failed(self, error: Exception) -> None:
        """Called on the journal's thread."""
        self._loop.call_soon_threadsafe(self._stop, error)

    def _drop_held_reply(self, call: int) -> None:
        """Drops the held answer of a call whose caller has gone; while the disk is stuck, callers come and give up."""
        for index, (_, effect) in enumerate(self._held):
            if isinstance(effect, Reply) and effect.call == call:
                del self._held[index]
                return

    def _made_durable(self) -> None:
        self._durable = self._written
        held = self._held
        try:
            while held and held[0][0] <= self._durable:
                _, effect = held.popleft()
                self._reserve(effect, -1)
                self._release(effect)
        except Exception as error:  # somebody misses an answer: as bad as a failed step
            self._stop(error)
            raise
        if self._journal is not None and self._journal.removed:
            self._step(JournalRemoved())
        self._flush()

    def _stop(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
        self.close()

    # -- sending -------------------------------------------------------------------------------------------------------

    def _release(self, effect: Outgoing) -> None:
        if isinstance(effect, Send):
            self._counters.observe(effect.frame, len(effect.recipients))
            shared = effect.frame.SerializeToString()
            for stream, overlay in effect.recipients:
                self._write(stream, shared, overlay)
        elif isinstance(effect, Reply):
            self._answer(effect)
        elif effect.stream in self._queues:
            self._queues[effect.stream].finish()

    def _answer(self, reply: Reply) -> None:
        waiting = self._calls.get(reply.call)
        if waiting is None or waiting[0].done():
            return
        answer, hold = waiting
        try:
            hold(reply.message.ByteSize())
        except LimitExceededError as error:
            answer.set_exception(error)
        else:
            answer.set_result(reply.message)

    def _reserve(self, effect: Outgoing, times: int) -> None:
        """Reserves room for what an effect will write, or with -1 as `times` releases it."""
        if isinstance(effect, Send):
            shared_bytes = effect.frame.ByteSize()
            for stream, overlay in effect.recipients:
                if stream in self._queues:
                    self._queues[stream].reserve(times * (shared_bytes + len(overlay)))

    def _write(self, stream: int, shared: bytes, overlay: bytes) -> None:
        queue = self._queues.get(stream)
        if queue is not None and not queue.push(shared, overlay):
            _log.warning("stream %d leaves too much unread and is disconnected; it may resume", stream)
            self._loop.call_soon(self.disconnect, stream)


def _is_status(effect: Outgoing) -> bool:
    return isinstance(effect, Reply) and isinstance(effect.message, session_pb2.StatusResponse)


def _log_note(note: Note) -> None:
    """Logs a note, with its fields as `extra`."""
    level = logging.INFO if note.kind in _ROUTINE else logging.WARNING
    about = {"event": note.kind, "job": note.job, "rank": None if note.rank < 0 else note.rank, "generation": note.generation}
    _job_log.log(level, "job %s: %s", note.job, note.text, extra=about)
