"""One rank of a system that is measured. What a system cannot do it refuses, on every rank alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from ferrorpc.cli.bench.case import ORDINARY
from ferrorpc.errors import BackendUnavailableError

Action = Callable[[], object]


class Runner(ABC):
    """A rank in a world that has met when the constructor returns.

    Args:
        settings: of the `case.System`.

    Attributes:
        name: of the system, in messages.
        rank, size: its place.
        version: of what is measured.
    """

    name: ClassVar[str]
    rank: int
    size: int
    version: str

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = settings

    def array(self, count: int, dtype: str, memory: str) -> Any:
        """`count` elements of the kind this system takes, in "ordinary" or "registered" memory; contents undefined.

        Raises:
            BackendUnavailableError: it has no such dtype or memory.
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
        """What is to be called for one barrier."""
        raise self.unable("barrier")

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        """What is to be called for one sum in place."""
        raise self.unable("all_reduce")

    def exchange(self, operation: str, source: Any, target: Any) -> Action:
        """What is to be called for one of `case.EXCHANGES`, from one array into another; in a broadcast they are one."""
        raise self.unable(operation)

    def send(self, array: Any, count: int) -> None:
        """On rank 0: sends the array `count` times, and returns when rank 1 answers that it has all of them."""
        raise self.unable("send")

    def receive(self, array: Any, count: int) -> Any:
        """On rank 1: takes `count` arrays, answers, and returns the last one, which may be `array`, written to."""
        raise self.unable("receive")

    @abstractmethod
    def close(self) -> None:
        """Leaves the world."""

    def unable(self, what: str) -> BackendUnavailableError:
        """The error for what this system does not have."""
        return BackendUnavailableError(f"{self.name} has no {what}", "measure without it")
