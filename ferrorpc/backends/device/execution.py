"""The steps that every operation on a GPU goes through: wait for its turn, launch, record the end event, complete."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from ferrorpc.arrays.device import Device, Stream
from ferrorpc.arrays.event import Event
from ferrorpc.backends.device.context import GroupContext
from ferrorpc.backends.device.in_flight import InFlightExecution, first_cause
from ferrorpc.backends.device.launch_queue import LaunchQueue
from ferrorpc.collectives.driver import failure_of, verdict
from ferrorpc.collectives.execution import deadline_error
from ferrorpc.errors import FerroError
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key


class DeviceExecution(InFlightExecution):
    """The base of operations on arrays and on raw pointers.

    Attributes:
        until_done: `advance` returns True only when the GPU has reached the end event, not as soon as that is recorded. At
            first so where results are for the host.
        on_queued: called once the end event is recorded.
        stream: the CUDA stream that it is launched in.
        caller: the one that was current on the calling thread.
        after: events that the launch waits for on the GPU. Until they are reached, this rank's own work delays the operation.
    """

    device: Device
    stream: Stream
    caller: Stream
    context: GroupContext
    until_done = False
    on_queued: Callable[[], None] | None = None
    after: Sequence[Event] = ()
    _was_delayed_here = False

    def __init__(self, context: GroupContext, launch_queue: LaunchQueue, guard: Guard) -> None:
        self.context = context
        self.device = context.device
        self.polling = context.polling
        self.launch_queue = launch_queue
        self.stream = launch_queue.stream
        self.guard = guard

    @property
    def position(self) -> int:  # type: ignore[override]
        """As `Execution.position`: once it is launched, the next one can be."""
        return int(self.end_event is not None)

    def join(self) -> None:
        """Makes the calling thread's current stream wait for the end event. The host does not wait."""
        if self.end_event is None:
            raise AssertionError(f"{self.label} was not launched")
        self.device.current().wait(self.end_event)
        self.is_joined = True

    def ran(self) -> bool:
        """As `Execution.ran`. It is watched from then on."""
        if self.end_event is None:
            return False
        if self.caller is not self.stream:
            self.caller.wait(self.end_event)
        self.is_joined = True
        self.context.watch(self)
        return True

    def waiting_on(self) -> list[int]:
        return list(self.context.others)

    def explain(self) -> str:
        """NCCL does not say which rank it waits for."""
        return f"{self.label} waits for ranks {self.context.others}, or for what their GPUs and this one were given before it"

    def timeout_error(self) -> FerroError:
        return deadline_error(self, self.context.lanes.session.described)

    def probe_others(self, key: Key, signature: str, number: int) -> None:
        """Asks the other ranks what they call under this key. Where that is something else, the generation ends with both
        signatures."""
        if not self._needs_others():
            return
        if self.end_event is not None:
            self.context.probe(key, signature, number)
            return
        for rank in self.waiting_on():
            self.context.lanes.transport.probe(rank, key, signature)

    def _needs_others(self) -> bool:
        """False where this rank's own GPU delays the operation, or did at the last probe: the others may have finished it."""
        delayed = (self.end_event is not None and self.end_event.done) or not all(event.done for event in self.after)
        before, self._was_delayed_here = self._was_delayed_here, delayed
        return not (before or delayed)

    def was_released(self) -> bool:
        """Whether it was released. Raises the generation's first cause if that happened without its completion."""
        if self.released and not self.has_completed:
            self.guard.latch.check()
        return self.released

    def check_end_reached(self) -> bool:
        """Whether the GPU has reached the end event, and the result is valid.

        To abort a communicator lets the GPU run past its operations without a result. That happens only after the generation
        has ended, so the result is valid if the latch has not tripped when the end event is found reached. Where this rank
        knows that it is about to trip, the operation is left in flight until it does.

        Raises:
            NcclError: the communicator has met an error.
            FerroError: the generation's first cause.
        """
        if self.end_event is None or not (self.end_reached or self.end_event.done):
            self.launch_queue.has_launched(self)
            return False
        self.end_reached = True
        self.guard.latch.check()
        self.has_completed = not self.guard.latch.ended_here
        return self.has_completed

    def buffers_in_use(self) -> object:
        """The memory of this rank that the GPU may be using; None for none."""
        return None

    def release(self) -> None:
        """Drops what the operation holds. Buffers that the GPU may still use are kept until it has reached the end event."""
        if self.released:
            return
        self.released = True
        if self.end_event is None:
            self.launch_queue.discard(self)  # first: it waits for another thread that may just be launching it
        buffers = None if self.end_reached else self.buffers_in_use()
        if buffers is not None:
            self.context.ending.keep(self.stream, self.end_event, buffers)
        self.drop_references()
        self.context.remove(self)

    def finish(self) -> None:
        """Ends the driver's part. A launched operation stays in flight until it completes, unless the generation has ended."""
        if self.end_event is None or self.guard.latch.cause is not None:
            self.release()

    def drop_references(self) -> None:
        """Drops the references that it holds, except those to its results."""

    def notify_queued(self) -> None:
        """Calls `on_queued`, once."""
        if self.on_queued is not None:
            self.on_queued()
            self.on_queued = None


class ImmediateExecution(DeviceExecution):
    """An operation in program order that has all it needs from the start. It is launched at its turn, which is mostly at once.

    Args:
        stream: where to launch it; None for the launch queue's stream, which first waits for what the caller's stream holds.
    """

    has_place = False
    """Whether it has taken its place in program order."""

    def __init__(self, context: GroupContext, guard: Guard, stream: Stream | None = None) -> None:
        super().__init__(context, context.program, guard)
        self.results, self.specs = [], []
        self.in_launch_order = stream is None
        self._begins: Event | None = None
        if stream is not None:
            self.stream = self.caller = stream
        self.is_launched = False

    @abstractmethod
    def launch(self, pointer: int) -> None:
        """Asks the communicator for the operation, in the CUDA stream with this number."""

    def enter(self) -> None:
        """Takes the next place in program order and, where it is its turn already, launches it. To be called once, first.

        An error of the launch is kept for the driver, as by `begin`.

        Raises:
            UsageError: a CUDA graph is being captured from the caller's stream, or the queue's: the operation has no place.
        """
        queue = self.launch_queue
        try:
            with self.device.here():
                if self.in_launch_order:
                    queue.check()
                    self.caller, self._begins = self.device.marked()
                with queue.lock:
                    self.number, self.has_place = queue.enqueue(self), True
                    self.context.add(self)
                    try:
                        self._launch_in_turn()
                    except Exception as problem:  # noqa: BLE001  drivers know what to do about each kind
                        self._early_error = problem.with_traceback(None)
        except BaseException as error:
            self.struck(error)
            raise

    def struck(self, error: BaseException) -> None:
        """Ends its part here after an error that no driver will have: a refusal, an interrupt, or another error of a signal
        handler. If it has its place, perhaps it was launched, perhaps not: the other ranks cannot go on with this one."""
        if not self.has_place or isinstance(error, FerroError):
            self.finish()
            return
        try:
            verdict(self.guard, failure_of(self.label, error))
        finally:  # not `finish`: where the coordinator is slow to name the cause, nobody would come back to it
            self.release()

    @first_cause
    def advance(self) -> bool:
        if self._early_error is not None:
            self.raise_early_error()
        if self.end_event is None and not self._is_queued():
            return False
        return not self.until_done or self.try_complete()

    def _is_queued(self) -> bool:
        """Launches it at its turn. Returns whether that is done."""
        with self.launch_queue.lock, self.device.here():
            if not self._launch_in_turn():
                return False
        self.notify_queued()
        return True

    def _launch_in_turn(self) -> bool:
        """Launches it at its turn and records the end event; the launch queue's lock is held. Returns whether that is done."""
        queue, stream = self.launch_queue, self.stream
        if not self.is_launched:
            if not queue.is_next(self, self.number):
                return False
            if self._begins is not None:
                stream.wait(self._begins)
                self.after = (self._begins,) if queue.last_event is None else (self._begins, queue.last_event)
            self.launch(stream.pointer)
            self.is_launched = True
        if not queue.launches(self):
            return False
        end_event = stream.record()
        queue.dequeue(self, self.number)
        if self.in_launch_order:
            queue.last_event = end_event
        self.end_event = end_event
        return True

    @first_cause
    def try_complete(self) -> bool:
        if self.was_released():
            return True
        if not self.check_end_reached():
            return False
        self.release()
        return True
