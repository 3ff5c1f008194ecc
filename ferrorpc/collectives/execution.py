"""A running operation (`Execution`), and what a backend prepares to start one (`Prepared`).

An execution never blocks: `advance` does everything that can be done now. Its driver (the caller's thread for a blocking call,
the progress thread for an asynchronous one) parks until the execution calls `wake`, and advances it again. An execution in
shared memory has nobody to wake it and is polled. So one thread interleaves any number of operations, in whatever order their
messages arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ferrorpc.arrays.device import Device
from ferrorpc.collectives.polling import NAP_SECONDS_MIN, DevicePolling, Polling
from ferrorpc.errors import BarrierTimeoutError, CollectiveTimeoutError, FerroError
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key


class Execution(ABC):
    """One operation on one rank, from entry to result.

    Attributes:
        guard: its deadline and latch. The driver, not the execution, watches them.
        wake: set by the driver before the first `advance`; called from any thread when `advance` may get further.
        results: the arrays in storage dtypes, once `advance` returned True; empty where this rank gets nothing.
        specs: what each result holds.
    """

    guard: Guard
    wake: Callable[[], None]
    results: list[np.ndarray[Any, Any]]
    specs: list[TensorSpec]

    polling: Polling | DevicePolling | None = None
    """How to wait for it where nobody calls `wake`: by calling `advance` again and again."""

    device: Device | None = None
    """Where arrays are that it holds. CuPy frees those of the null stream in that of the device which is current then."""

    position = 0
    """How far it is, for whoever polls it; any change is progress."""

    timeout_breaks = True
    """Whether its deadline ends the generation; a recv's does not."""

    @property
    def nap_seconds(self) -> float:
        """How long the progress thread sleeps at least between two looks, where it polls."""
        return NAP_SECONDS_MIN

    @abstractmethod
    def advance(self) -> bool:
        """Does what can be done without waiting. True when the operation is complete.

        Raises:
            FerroError: the operation failed on this rank; the driver reports it and breaks the generation, unless it is a
                UsageError, which concerns this rank alone.
        """

    def attend(self) -> None:
        """It waits, and its driver is about to sleep: what can be read of its messages on this thread at once is read first."""
        return

    @property
    @abstractmethod
    def label(self) -> str:
        """For explanations and errors, such as "all_reduce(op=sum, float32[3]) #12"."""

    def __str__(self) -> str:
        return self.label

    @abstractmethod
    def waiting_on(self) -> list[int]:
        """World ranks whose part has not come, as far as is known; [] when complete."""

    @abstractmethod
    def probe(self) -> None:
        """Asks those waited on where they stand. The driver calls it after a while without progress."""

    @abstractmethod
    def explain(self) -> str:
        """One sentence: what is waited for, on whom, and what they answered to the last probe."""

    @abstractmethod
    def timeout_error(self) -> FerroError:
        """The error of this operation's deadline: CollectiveTimeoutError, or BarrierTimeoutError for a barrier."""

    def arrive(self) -> None:
        """Once complete: the calling thread's current stream goes on after those of its results that are on a device."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Frees what the operation held, after success or failure. Idempotent."""


class PointerAllReduce(Protocol):
    """A prepared all_reduce that takes addresses of a GPU's memory in place of arrays."""

    def start_at(self, key: Key, source: int, target: int, keeps: object, guard: Guard) -> Execution:
        """A new execution of this call, in program order, ordered after the caller's current stream.

        Args:
            key: as for `Prepared.start`.
            source: where the elements to reduce lie, one after the other.
            target: where results go: there, or where nothing of them is.
            keeps: what has to live until the GPU is through.
            guard: deadline and latch.
        """

    def ran(self, execution: Execution) -> bool:
        """Whether such an execution was complete at once, so that the caller's stream goes on after it. Else a driver takes it
        further, and raises what it has met."""


class Prepared(ABC):
    """A call validated, its algorithm selected and laid out; started once per operation number."""

    def for_pointers(self, device: Device) -> PointerAllReduce | None:
        """The same for addresses on that GPU; None where this is not for such."""
        return None

    @abstractmethod
    def start(
        self,
        key: Key,
        inputs: Sequence[np.ndarray[Any, Any]],
        outputs: Sequence[np.ndarray[Any, Any]] | None,
        guard: Guard,
    ) -> Execution:
        """A new execution of this call.

        Args:
            key: its identity; all ranks of the group start it under the same key.
            inputs: C-contiguous arrays matching `call.inputs`, in storage dtypes (bfloat16 as uint16). Read only, and
                unchanged until the execution is complete, unless they are also outputs. Some may be on a device, if the
                backend says that it takes such (`Capabilities.device_arrays`).
            outputs: C-contiguous arrays for the results, possibly the inputs themselves; None to allocate them.
            guard: deadline and latch.
        """


def describe_absent(rank: int, signature: str, number: int) -> str:
    """That a rank is not in an operation, and what it entered last; "" where that is nothing."""
    last = f"last entered {signature} #{number}" if signature else "has entered nothing of this group"
    return f"rank {rank} (not there yet: {last})"


def deadline_error(execution: Execution, describe: Callable[[list[int]], str], *, barrier: bool = False) -> FerroError:
    """The error of an operation whose deadline has passed: who is waited for, and what is known of them.

    Args:
        describe: what the coordinator knows of world ranks, in words; "" for nothing.
    """
    waiting = execution.waiting_on()
    sentences = f"after {execution.guard.seconds:g} s, {execution.explain()}", describe(waiting)
    kind = BarrierTimeoutError if barrier else CollectiveTimeoutError
    return kind(waiting, "; ".join(filter(None, sentences)))


def return_execution(execution: Execution) -> Execution:
    """What a Work holds where its result is made by who waits for it, from the complete execution."""
    return execution
