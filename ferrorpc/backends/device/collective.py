"""A collective on arrays, from the call to the end event behind which the result is valid.

Phases. The operation exchanges an announcement, where one is needed. At its turn it is launched in the communicator's stream,
which first waits for what the caller's stream held when the operation was started. Once the communicator has launched
everything, the copies that follow are queued and the end event is recorded. From then on whatever is ordered after the end
event may use results on the GPU. When the GPU has reached the end event, results for the host are copied there, and the buffers
are released. Until then every buffer is kept alive, whatever the caller does with its arrays.

Nothing here blocks: a driver calls `advance` again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ferrorpc.arrays.device import DeviceArray, is_host
from ferrorpc.arrays.kinds import copy_into
from ferrorpc.backends.device.announcement import (
    DESCRIBED,
    ROOT_DECIDES,
    Announced,
    announcing_call,
    key_beside,
    pack,
    unpack,
)
from ferrorpc.backends.device.communicator import Connector, DataType, Op
from ferrorpc.backends.device.context import GroupContext
from ferrorpc.backends.device.execution import DeviceExecution
from ferrorpc.backends.device.in_flight import first_cause
from ferrorpc.backends.device.launch import Launch, results_of
from ferrorpc.backends.device.launch_queue import NumberedLaunchQueue
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.workspace import fitting
from ferrorpc.errors import TensorMismatchError
from ferrorpc.guard import Guard, wake_nobody
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key


class CollectivePrepared(Prepared):
    """A collective prepared for one group.

    Args:
        connector: makes the group's communicators.
        reduction: as in `Launch`.
        on_host: runs the call instead where the root announces that its arrays are on the host; None: the communicator
            always runs it.
    """

    def __init__(
        self,
        context: GroupContext,
        call: Call,
        connector: Connector,
        reduction: tuple[Op, DataType, int] | None,
        on_host: Prepared | None = None,
    ) -> None:
        self.context = context
        self.call = call
        self.reduction = reduction
        self.on_host = on_host
        # Unless the root decides, this differs from the host lanes' signature: a rank whose array is on the host is a mismatch.
        self.signature = call.signature + ("" if on_host else f" by {connector.library}")
        self._root_goes_ahead = call.operation in ROOT_DECIDES and not connector.waits_on_gpu
        self._announcing: dict[tuple[int | None, int], Prepared] = {}
        """By the only rank that announces (None: all do) and the size of this rank's announcement; -1 for none."""

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        for array in (*inputs, *(outputs or ())):
            if not is_host(array) and not self.context.device.holds(array):
                own = self.context.device.index
                raise TensorMismatchError(
                    f"the array is on GPU {array.device.id}, but this rank's communicator is on GPU {own}",
                    hint="make arrays on this rank's GPU, which FERRORPC_DEVICE names, or copy them there",
                )
        return CollectiveExecution(self, key, inputs, outputs, guard)

    def announce(self, key: Key, number: int, on_host: bool, guard: Guard) -> Execution | None:
        """The exchange that has to come before the launch; None where none has to."""
        context, call = self.context, self.call
        is_described = call.operation in DESCRIBED
        if not is_described and (key.stream == 0 or context.size == 1):
            return None
        speaker = None if is_described else 0
        if self._root_goes_ahead and key.stream == 0:
            speaker = call.root
        message = None
        if speaker in (None, context.rank):
            message = pack(number, on_host, call.inputs if is_described else ())
        size = -1 if message is None else message.size
        prepared = self._announcing.get((speaker, size))
        if prepared is None:
            announcing = announcing_call(speaker, message, f"announcing {self.signature}")
            prepared = self._announcing[speaker, size] = context.lanes.prepare(announcing)
        return prepared.start(key_beside(key), [] if message is None else [message], None, guard)


class CollectiveExecution(DeviceExecution):
    """One run of a prepared collective."""

    def __init__(
        self, prepared: CollectivePrepared, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard
    ) -> None:
        context = prepared.context
        super().__init__(context, context.launch_queue(key.stream), guard)
        self.results: list[Any] = []
        self.specs: list[TensorSpec] = []
        self.in_launch_order = key.stream == 0
        """Several threads may launch operations of streams, and have them watched in another order."""
        self._prepared = prepared
        self._key = key
        self._outputs = outputs
        self._on_host = all(is_host(array) for array in (*inputs, *(outputs or ())))
        self.until_done = self._on_host
        self.caller = context.device.current()
        self.launch_queue.check()
        self._inputs = inputs
        stays = self._on_host and prepared.on_host is not None
        self._sources: list[DeviceArray] = [] if stays else [self._uploaded(array) for array in inputs]
        self._targets: list[DeviceArray] = []
        self._everyones: list[Announced] = []
        if prepared.call.operation not in DESCRIBED:
            self._place()
        self._begins = self.caller.record()
        self._launch: Launch | None = None
        self._completing = threading.Lock()
        """Held while results are copied to the host, which only one thread may do: afterwards they belong to the caller."""
        self._diverted: Execution | None = None
        """The run by the host lanes, where the root has announced that its arrays are on the host."""
        self._announcement: Execution | None = None
        try:
            with self.launch_queue.lock:
                self._number = self.launch_queue.enqueue(self)
            self._announcement = prepared.announce(key, self._number, self._on_host, guard)
            context.lanes.transport.mailbox.enter(key, prepared.signature, wake_nobody)
            context.add(self)
        except BaseException:  # an interrupt, too: no driver will have it, so it must not keep its place
            self.release()
            raise

    def begin(self) -> bool:
        """As `InFlightExecution.begin`, except for an operation of a stream whose root says who runs it: that may be the host
        lanes."""
        return (self._prepared.on_host is None or self._key.stream == 0) and super().begin()

    def _uploaded(self, array: Any) -> DeviceArray:
        return self.context.device.staging.to_device(array, self.guard) if is_host(array) else array

    @property
    def label(self) -> str:
        return f"{self._prepared.signature} #{self._key.number}"

    @first_cause
    def advance(self) -> bool:
        self.raise_early_error()
        if self._announcement is not None and not self._announced(self._announcement):
            return False
        if self._diverted is not None:
            return self._advance_on_host(self._diverted)
        if self.end_event is None and not (self._is_launched() and self._is_queued()):
            return False
        return not self.until_done or self.try_complete()

    def _announced(self, announcement: Execution) -> bool:
        announcement.wake = self.wake
        if not announcement.advance():
            return False
        heard = [unpack(message) for message in announcement.results]
        if self._prepared.call.operation in DESCRIBED:
            self._everyones = heard if len(heard) > 1 else heard * self.context.size
        if isinstance(self.launch_queue, NumberedLaunchQueue):
            self._number = heard[0].number
        self._announcement = None
        announcement.finish()
        on_host, root = self._prepared.on_host, self._prepared.call.root
        if on_host is not None and root is not None and self._everyones[root].on_host:
            with self.launch_queue.lock:
                self.launch_queue.dequeue(self, self._number)
            outputs = self._outputs if self._on_host else None
            self._diverted = on_host.start(self._key, self._inputs, outputs, self.guard)
        return True

    def _advance_on_host(self, execution: Execution) -> bool:
        execution.wake = self.wake
        if not execution.advance():
            return False
        self.results, self.specs = execution.results, execution.specs
        self.release()
        return True

    @property
    def _other(self) -> Execution | None:
        """What runs on the host lanes for it now."""
        return self._announcement or self._diverted

    def _is_launched(self) -> bool:
        """Launches it at its turn. Returns whether that is done."""
        if self._launch is not None:
            return True
        queue = self.launch_queue
        with queue.lock:
            if not queue.is_next(self, self._number):
                return False
            call, context = self._prepared.call, self.context
            with context.device.here():
                made = None
                if call.operation in DESCRIBED:
                    if self._must_wait_for_memory():
                        return False
                    made = self.caller.record() if self._place() else None
                self.after = [event for event in (self._begins, queue.last_event, made) if event is not None]
                queue.stream.wait(self._begins)
                if made is not None:  # memory that was used, and given back, in the caller's stream
                    queue.stream.wait(made)
                self._launch = Launch(
                    queue.communicator,
                    context.device,
                    queue.stream,
                    context.rank,
                    context.size,
                    call,
                    self._sources,
                    self._targets,
                    self._prepared.reduction,
                )
                self._launch.run()
        return True

    def _must_wait_for_memory(self) -> bool:
        """Whether it needs new arrays and none can be had, because a graph is being captured from the caller's stream."""
        if not self.context.device.is_captured(self.caller):
            return False
        return any(found is None for found in self._given(results_of(self._prepared.call, self.context.rank, self._everyones)))

    def _given(self, specs: Sequence[TensorSpec]) -> list[DeviceArray | None]:
        """For each result the caller's output where it is on the GPU and fits."""
        found = [fitting(self._outputs, item, spec) for item, spec in enumerate(specs)]
        return [None if each is None or is_host(each) else each for each in found]

    def _place(self) -> bool:
        """Chooses where results go: the caller's outputs where they are on the GPU and fit, else new arrays.

        Returns whether any array was made.
        """
        call, context = self._prepared.call, self.context
        self.specs = results_of(call, context.rank, self._everyones)
        if self._everyones and call.root is not None and not self._sources:
            self._on_host = self._on_host and self._everyones[call.root].on_host
        given = self._given(self.specs)
        if len(self.specs) > 1 and all(found is None for found in given) and len(set(self.specs)) == 1:
            spec = self.specs[0]
            whole = context.device.empty((len(self.specs), *spec.shape), spec.dtype.storage, self.caller)
            self._targets = [whole[item] for item in range(len(self.specs))]
            return True
        self._targets = [
            context.device.empty(spec.shape, spec.dtype.storage, self.caller) if found is None else found
            for found, spec in zip(given, self.specs, strict=True)
        ]
        return any(found is None for found in given)

    def _is_queued(self) -> bool:
        """Queues the copies that follow and records the end event, once all is launched. Returns whether that is done."""
        queue, launch = self.launch_queue, self._launch
        if launch is None or not queue.launches(self):
            return False
        with queue.lock:
            if self.end_event is None:
                for target, source in launch.after:
                    self.context.device.copy(target, source, queue.stream)
                end_event = queue.stream.record()
                self.results = self._targets
                self.end_event = queue.last_event = end_event
                queue.dequeue(self, self._number)
        self.notify_queued()
        return True

    @first_cause
    def try_complete(self) -> bool:
        """As `InFlightExecution.try_complete`; copies results for the host there."""
        if self.was_released():
            return True
        if self._other is not None or not self.check_end_reached():
            return False
        with self._completing:
            if not self.released:
                if self._on_host:
                    self._copy_to_host()
                self.release()
        return True

    def _copy_to_host(self) -> None:
        down = self.context.device.staging.to_host
        self.results = []
        for item, (target, spec) in enumerate(zip(self._targets, self.specs, strict=True)):
            with self.context.copying_to_host():
                found = down(target).reshape(spec.shape)
            given = fitting(self._outputs, item, spec)
            if given is not None:
                copy_into(given, found)
                found = given
            self.results.append(found)

    def waiting_on(self) -> list[int]:
        return super().waiting_on() if self._other is None else self._other.waiting_on()

    def probe(self) -> None:
        if self._other is not None:
            self._other.probe()
        self.probe_others(self._key, self._prepared.signature, self._number)

    def explain(self) -> str:
        return super().explain() if self._other is None else self._other.explain()

    def buffers_in_use(self) -> object:
        return None if self._launch is None else (self._inputs, self._outputs, self._launch)

    def drop_references(self) -> None:
        if self._other is not None:
            self._other.finish()
        self.context.lanes.transport.mailbox.leave(self._key)
        self._sources, self._launch = [], None
