"""The interface to one rank of a measured system. An unsupported operation is refused on every rank alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ferrorpc.cli.bench.case import ORDINARY
from ferrorpc.errors import BackendUnavailableError

Action = Callable[[], object]


class Runner(ABC):
    """A rank of a measured system, made with the settings of the `case.System`. When the constructor returns, all ranks are
    connected.

    Attributes:
        name: the system's name in messages.
        rank, size: its rank, and the number of ranks.
        version: name and version of the measured software.
    """

    name: ClassVar[str]
    rank: int
    size: int
    version: str

    def array(self, count: int, dtype: str, memory: str) -> Any:
        """An uninitialised array of this system's kind, in "ordinary" or "registered" memory.

        Raises:
            BackendUnavailableError: the dtype or kind of memory is not supported.
        """
        if memory != ORDINARY:
            raise self.unable(f"{memory} memory")
        return np.empty(count, dtype)

    def write(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        """Copies float32 values into an array."""
        array[...] = values

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy of an array as float32."""
        return np.asarray(array).astype(np.float32)

    def barrier(self) -> Action:
        """A function that performs one barrier."""
        raise self.unable("barrier")

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        """A function that performs one in-place sum."""
        raise self.unable("all_reduce")

    def exchange(self, operation: str, source: Any, target: Any) -> Action:
        """A function that performs one of `case.EXCHANGES` from `source` to `target`, which are the same in a broadcast."""
        raise self.unable(operation)

    def send(self, array: Any, count: int) -> None:
        """On rank 0: sends the array `count` times and returns when rank 1 confirms all of them."""
        raise self.unable("send")

    def receive(self, array: Any, count: int) -> Any:
        """On rank 1: receives `count` arrays and confirms them. Returns the last one, which may be `array`."""
        raise self.unable("receive")

    @abstractmethod
    def close(self) -> None:
        """Leaves the job."""

    def unable(self, what: str) -> BackendUnavailableError:
        """The error for something that this system does not support."""
        return BackendUnavailableError(f"{self.name} has no {what}", "measure without it")
