"""A running operation (`Execution`), and what a backend prepares to start one (`Prepared`).

An execution never blocks: `advance` does everything that can be done now. Its driver (the caller's thread for a blocking call,
the progress thread for an asynchronous one) parks until the execution calls `wake`, and advances it again. An execution in
shared memory has nobody to wake it and is polled. So one thread interleaves any number of operations, in whatever order their
messages arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ferrorpc.arrays.device import Device
from ferrorpc.collectives.polling import NAP_SECONDS_MIN, DevicePolling, Polling
from ferrorpc.errors import BarrierTimeoutError, CollectiveTimeoutError, FerroError
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key

Array = np.ndarray[Any, Any]
Describe: TypeAlias = Callable[[list[int]], str]
"""Returns what the coordinator knows of world ranks, as text; "" for nothing. Called only when a deadline has passed."""

_UNREACHED_HINT: Final = (
    "look at what is between this host and the addresses above, such as firewalls and routes; if an address is wrong, set "
    "FERRORPC_ADVERTISE on its rank"
)
_LOST_HINT: Final = (
    "see what became of the rank whose link was lost: the coordinator, once it answers again, tells all ranks, and "
    "group.reform() goes on without it"
)


class Execution(ABC):
    """One operation on one rank, from entry to result.

    Attributes:
        guard: its deadline and latch, which the driver watches.
        wake: set by the driver before the first `advance`; called from any thread when `advance` may make progress.
        results: the arrays in storage dtypes, once `advance` returned True; empty where this rank has no result.
        specs: dtype and shape of each result.
    """

    guard: Guard
    wake: Callable[[], None]
    results: list[Array]
    specs: list[TensorSpec]

    polling: Polling | DevicePolling | None = None
    """How its driver polls `advance`, where nobody calls `wake`."""

    @property
    def queue(self) -> object:
        """What it shares with the operations that cannot begin before it is over; by default with none."""
        return self

    device: Device | None = None
    """The device of the arrays that it holds. CuPy frees arrays of the null stream on the device that is current then."""

    position = 0
    """For the driver that polls it: any change is progress."""

    awaited: object = None
    """What the caller of a recv calls its message, for explanations: a pipeline's tags say nothing to its user."""

    has_begun = False
    """Whether it was advanced before its driver got it, and goes on with its events."""

    has_ended = False
    """Whether an event has completed it, perhaps before its driver had it."""

    has_polled = False
    """Whether its caller has polled the lane for it before, so that its driver should sleep at once."""

    timeout_breaks = True
    """Whether its deadline ends the generation; a recv's does not."""

    fails_alone = False
    """Whether its error concerns this rank alone, of whatever class it is."""

    @property
    def nap_seconds(self) -> float:
        """The shortest sleep of the progress thread between two polls."""
        return NAP_SECONDS_MIN

    @property
    def can_be_assisted(self) -> bool:
        """Whether the thread that waits for it may advance it for a moment, instead of the progress thread. Not where it waits
        for a device, or where polling takes a peer's processor."""
        return self.device is None and isinstance(self.polling, Polling) and self.polling.has_processor

    @abstractmethod
    def advance(self) -> bool:
        """Does what can be done without waiting. True when the operation is complete.

        Raises:
            FerroError: the operation failed on this rank; the driver reports it and breaks the generation, unless it is a
                UsageError, which concerns this rank alone.
        """

    def begin_failed(self, error: Exception) -> None:
        """Begins it with an error, which its driver meets; raises the error where that is not possible."""
        raise error

    def busy_poll(self) -> bool:
        """Called when the driver is about to sleep: reads its messages on this thread, for a moment. Whether all have come."""
        return False

    @property
    @abstractmethod
    def label(self) -> str:
        """For explanations and errors, such as "all_reduce(op=sum, float32[3]) #12"."""

    def __str__(self) -> str:
        return self.label

    @abstractmethod
    def waiting_on(self) -> list[int]:
        """World ranks whose part has not arrived, as far as is known; [] when complete."""

    @abstractmethod
    def probe(self) -> None:
        """Asks the ranks it waits for where they are. The driver calls it after a while without progress."""

    @abstractmethod
    def explain(self) -> str:
        """One sentence: what it waits for, from which ranks, and what they answered to the last probe."""

    @abstractmethod
    def timeout_error(self) -> FerroError:
        """The error of this operation's deadline: CollectiveTimeoutError, or BarrierTimeoutError for a barrier."""

    def ran(self) -> bool:
        """Whether it is launched on a GPU already, so that the caller's stream is ordered after it, which this sees to. If not,
        a driver has to advance it, which also raises its error."""
        return False

    def make_stream_wait(self) -> None:
        """Once complete: makes the calling thread's current stream wait for the results that are on a device."""
        return

    def withdraw(self, error: FerroError) -> bool:
        """Lets it fail with this error, alone, if it is a recv that has no message. Returns whether it does."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Frees what the operation held, after success or failure. Idempotent."""

    def give_back(self) -> None:
        """Called in place of a result that the caller could not get: finishes. A recv leaves its message for the next one, also
        if it is complete."""
        self.finish()


class PointerAllReduce(Protocol):
    """A prepared all_reduce that takes addresses of a GPU's memory in place of arrays.

    Attributes:
        signature: its text.
    """

    signature: str

    def start_at(self, key: Key, source: int, target: int, keeps: object, guard: Guard) -> Execution:
        """A new execution of this call, in program order, ordered after the caller's current stream.

        Args:
            key: as for `Prepared.start`.
            source: address of the elements to reduce, which are contiguous.
            target: address for the result: `source` itself, or memory that does not overlap it.
            keeps: objects to keep alive until the GPU has finished.
            guard: deadline and latch.
        """


class Prepared(ABC):
    """A validated call with its algorithm and plan; started once per operation number."""

    def for_pointers(self, device: Device) -> PointerAllReduce | None:
        """This call for addresses on a GPU; None where it does not support them."""
        return None

    @abstractmethod
    def start(self, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard) -> Execution:
        """A new execution of this call.

        Args:
            key: its identity; all ranks of the group start it under the same key.
            inputs: C-contiguous arrays matching `call.inputs`, in storage dtypes (bfloat16 as uint16). Read only, and
                unchanged until the execution is complete, unless they are also outputs. They may be on a device if the
                backend supports it (`Capabilities.device_arrays`).
            outputs: C-contiguous arrays for the results, possibly the inputs themselves; None to allocate them.
            guard: deadline and latch.
        """


def describe_absent(rank: int, signature: str, number: int) -> str:
    """Text saying that a rank is not in an operation, and what it entered last (`signature` "": nothing)."""
    last = f"last entered {signature} #{number}" if signature else "has entered nothing of this group"
    return f"rank {rank} (not there yet: {last})"


def hint_about(
    ranks: Iterable[int], transport: Transport, otherwise: str | None = None, under_way: Container[int] = ()
) -> str | None:
    """What to try where these world ranks do not come: about a link that was lost, or about a rank that no lane has reached.

    Args:
        under_way: ranks whose data flows, so that whether a lane has reached them is beside the point.
    """
    lost, unreached = transport.lost(), transport.unreached()
    if any(rank in lost for rank in ranks):
        return _LOST_HINT
    return _UNREACHED_HINT if any(rank in unreached and rank not in under_way for rank in ranks) else otherwise


def deadline_error(execution: Execution, describe: Describe, *, barrier: bool = False, hint: str | None = None) -> FerroError:
    """The error of an operation whose deadline has passed: which ranks it waits for, and what is known of them."""
    waiting = execution.waiting_on()
    sentences = f"after {execution.guard.seconds:g} s, {execution.explain()}", describe(waiting)
    kind = BarrierTimeoutError if barrier else CollectiveTimeoutError
    return kind(waiting, "; ".join(filter(None, sentences)), hint=hint)


def return_execution(execution: Execution) -> Execution:
    """The conversion for a Work whose result is made by the waiting thread, from the complete execution."""
    return execution
