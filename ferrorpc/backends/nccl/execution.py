"""One operation by NCCL, from the caller's arrays to the mark in the stream after which the result is there.

Phases. It announces, where something has to be announced. When its turn has come it is launched in the communicator's stream,
which first waits for what the caller's stream held when the operation was started. Once NCCL has launched everything, the
copies that follow are queued, and a mark. From then on the result is certain: what is on the GPU may be used by whatever comes
after the mark. When the GPU has come past the mark, results for the host are brought there, and what the operation held is let
go: until then every buffer is kept, whatever the caller does with it.

Nothing here blocks: whoever drives it looks again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.arrays.device import DeviceArray, is_host
from ferrorpc.arrays.kinds import copy_into
from ferrorpc.backends.nccl.airborne import first_cause, nobody
from ferrorpc.backends.nccl.announcement import DESCRIBED, Announced, announcing_call, key_beside, pack, unpack
from ferrorpc.backends.nccl.api import DataType, Op
from ferrorpc.backends.nccl.launch import Launch, results_of
from ferrorpc.backends.nccl.launched import Launched
from ferrorpc.backends.nccl.lineup import NumberedLineup
from ferrorpc.backends.nccl.site import Site
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.errors import TensorMismatchError
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key

Array = np.ndarray[Any, Any]


class NcclPrepared(Prepared):
    """A call, for one group.

    Args:
        library: whose communicator it is, in words.
        reduction: as in `Launch`.
        on_host: what runs the call instead where the root announces that its arrays are on the host; None: NCCL does all.
    """

    def __init__(
        self,
        site: Site,
        call: Call,
        library: str,
        reduction: tuple[Op, DataType, int] | None,
        on_host: Prepared | None = None,
    ) -> None:
        self.site = site
        self.call = call
        self.reduction = reduction
        self.on_host = on_host
        # So that a rank whose array is on the host is found to call something else; unless the root decides.
        self.signature = call.signature + ("" if on_host else f" by {library}")
        self._announcing: dict[int, Prepared] = {}

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        for array in (*inputs, *(outputs or ())):
            if not is_host(array) and not self.site.device.holds(array):
                own = self.site.device.index
                raise TensorMismatchError(
                    f"the array is on GPU {array.device.id}, but this rank's communicator is on GPU {own}",
                    hint="make arrays on this rank's GPU, which FERRORPC_DEVICE names, or copy them there",
                )
        return NcclExecution(self, key, inputs, outputs, guard)

    def announce(self, key: Key, number: int, on_host: bool, guard: Guard) -> Execution | None:
        """The exchange that has to come first, where one has to."""
        site, call = self.site, self.call
        if call.operation not in DESCRIBED and key.stream == 0:
            return None
        speaks = call.operation in DESCRIBED or site.rank == 0
        message = pack(number, on_host, call.inputs if call.operation in DESCRIBED else ()) if speaks else None
        size = -1 if message is None else message.size
        prepared = self._announcing.get(size)
        if prepared is None:
            announcing = announcing_call(call, message, f"announcing {self.signature}")
            prepared = self._announcing[size] = site.lanes.prepare(announcing)
        return prepared.start(key_beside(key), [] if message is None else [message], None, guard)


class NcclExecution(Launched):
    """One run of a call."""

    def __init__(
        self, prepared: NcclPrepared, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard
    ) -> None:
        site = prepared.site
        super().__init__(site, site.lineup(key.stream), guard)
        self.results: list[Any] = []
        self.specs: list[TensorSpec] = []
        self.until_done = True
        self._prepared = prepared
        self._key = key
        self._outputs = outputs
        self._on_host = all(is_host(array) for array in (*inputs, *(outputs or ())))
        self.gives_device_arrays = not self._on_host
        self.caller = site.device.current()
        self._inputs = inputs
        stays = self._on_host and prepared.on_host is not None
        self._sources: list[DeviceArray] = [] if stays else [self._uploaded(array) for array in inputs]
        self._targets: list[DeviceArray] = []
        self._scratch: list[DeviceArray] = []
        self._everyones: list[Announced] = []
        if prepared.call.operation not in DESCRIBED:
            self._place()
        self._begins = self.caller.record()
        self._launch: Launch | None = None
        self._landing = threading.Lock()
        """One thread brings results home: they are the caller's once its driver is through."""
        self._diverted: Execution | None = None
        """The call by the host lanes, where it turned out to be one for them."""
        self._number = self.lineup.join(self)
        self._announcement = prepared.announce(key, self._number, self._on_host, guard)
        site.lanes.transport.mailbox.enter(key, prepared.signature, nobody)
        site.took_off(self)

    def begin(self) -> bool:
        """Unless others have to say something first, which wakes whoever drives it."""
        return self._announcement is None and super().begin()

    def _uploaded(self, array: Any) -> DeviceArray:
        return self.site.device.staging.up(array) if is_host(array) else array

    @property
    def label(self) -> str:
        return f"{self._prepared.signature} #{self._key.number}"

    @first_cause
    def advance(self) -> bool:
        self.raise_met()
        if self._announcement is not None and not self._announced(self._announcement):
            return False
        if self._diverted is not None:
            return self._advance_on_host(self._diverted)
        if self.mark is None and not (self._launched() and self._settled()):
            return False
        return not self.until_done or self.land()

    def _announced(self, announcement: Execution) -> bool:
        announcement.wake = self.wake
        if not announcement.advance():
            return False
        heard = [unpack(message) for message in announcement.results]
        if self._prepared.call.operation in DESCRIBED:
            self._everyones = heard
        if isinstance(self.lineup, NumberedLineup):
            self._number = heard[0].number
        self._announcement = None
        announcement.finish()
        on_host, root = self._prepared.on_host, self._prepared.call.root
        if on_host is not None and root is not None and heard[root].on_host:
            with self.lineup.lock:
                self.lineup.passed(self, self._number)
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

    def _launched(self) -> bool:
        """Launches it when it is its turn."""
        if self._launch is not None:
            return True
        lineup = self.lineup
        with lineup.lock:
            if not lineup.is_next(self, self._number):
                return False
            call, site = self._prepared.call, self.site
            with site.device.here():
                lineup.stream.wait(self._begins)
                self.after = [self._begins] if lineup.latest is None else [self._begins, lineup.latest]
                if call.operation in DESCRIBED and self._place():
                    made = self.caller.record()
                    lineup.stream.wait(made)  # in whose order their memory was given back before
                    self.after = [*self.after, made]
                self._launch = Launch(
                    lineup.communicator,
                    site.device,
                    lineup.stream,
                    site.rank,
                    site.size,
                    call,
                    self._sources,
                    self._targets,
                    self._prepared.reduction,
                    self._room,
                )
                self._launch.run()
        return True

    def _place(self) -> bool:
        """Where results go: where the caller wants them, as far as that is on the GPU and fits. Whether memory was made."""
        call, site = self._prepared.call, self.site
        self.specs = results_of(call, site.rank, self._everyones)
        if self._everyones and call.root is not None and not self._sources:
            self._on_host = self._on_host and self._everyones[call.root].on_host
        wanted = list(self._outputs or ())
        fit = [item < len(wanted) and _fits(wanted[item], spec) for item, spec in enumerate(self.specs)]
        if len(self.specs) > 1 and not any(fit) and len(set(self.specs)) == 1:
            spec = self.specs[0]
            whole = site.device.empty((len(self.specs), *spec.shape), spec.dtype.storage, self.caller)
            self._targets = [whole[item] for item in range(len(self.specs))]
            return True
        self._targets = [
            wanted[item] if fit[item] else site.device.empty(spec.shape, spec.dtype.storage, self.caller)
            for item, spec in enumerate(self.specs)
        ]
        return not all(fit)

    def _room(self, size_bytes: int) -> DeviceArray:
        """Scratch memory, which only the communicator's stream uses."""
        self._scratch.append(self.site.device.empty((size_bytes,), np.dtype(np.uint8), self.lineup.stream))
        return self._scratch[-1]

    def _settled(self) -> bool:
        """Queues what follows, and the mark, once NCCL has launched everything."""
        lineup, launch = self.lineup, self._launch
        if not lineup.has_launched(self) or launch is None:
            return False
        with lineup.lock:
            if self.mark is None:
                for target, source in launch.after:
                    self.site.device.copy(target, source, lineup.stream)
                mark = lineup.stream.record()
                self.results = self._targets
                self.mark = lineup.latest = mark
                lineup.passed(self, self._number)
        self.was_queued()
        return True

    @first_cause
    def land(self) -> bool:
        """Whether the GPU has come past the mark; then results for the host are there. Raises what NCCL has met meanwhile."""
        if self.is_over():
            return True
        if self._other is not None or not self.is_through():
            return False
        with self._landing:
            if not self.over:
                if self._on_host:
                    self._bring_home()
                self.release()
        return True

    def _bring_home(self) -> None:
        down = self.site.device.staging.down
        wanted = list(self._outputs or ())
        self.results = []
        for item, (target, spec) in enumerate(zip(self._targets, self.specs, strict=True)):
            with self.site.homewards():
                found = down(target).reshape(spec.shape)
            if item < len(wanted) and wanted[item].shape == spec.shape and wanted[item].dtype == spec.dtype.storage:
                copy_into(wanted[item], found)
                found = wanted[item]
            self.results.append(found)

    def waiting_on(self) -> list[int]:
        return super().waiting_on() if self._other is None else self._other.waiting_on()

    def probe(self) -> None:
        if self._other is not None:
            self._other.probe()
        self.ask(self._key, self._prepared.signature, self._number)

    def explain(self) -> str:
        return super().explain() if self._other is None else self._other.explain()

    def holdings(self) -> object:
        if self._launch is None:
            return None
        return self._inputs, self._outputs, self._sources, self._targets, self._scratch, self._launch.after

    def let_go(self) -> None:
        if self._other is not None:
            self._other.finish()
        self.site.lanes.transport.mailbox.leave(self._key)
        self._sources, self._scratch, self._launch = [], [], None


def _fits(wanted: Any, spec: TensorSpec) -> bool:
    return bool(not is_host(wanted) and wanted.shape == spec.shape and wanted.dtype == spec.dtype.storage)
