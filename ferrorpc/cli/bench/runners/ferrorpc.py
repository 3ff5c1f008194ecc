"""ferrorpc itself, through its public interface."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ferrorpc.bootstrap.process_group import init_process_group
from ferrorpc.cli.bench.case import REGISTERED
from ferrorpc.cli.bench.runners.base import Action, Runner
from ferrorpc.versions import own_version


class FerrorpcRunner(Runner):
    """A rank of a group. Its setting is "transport"."""

    name = "ferrorpc"

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.group = init_process_group(transport=settings["transport"])
        self.rank, self.size = self.group.rank, self.group.size
        self.version = f"ferrorpc {own_version()}"
        self._answer = np.zeros(1, np.uint8)

    def array(self, count: int, dtype: str, memory: str) -> Any:
        if memory == REGISTERED:
            return self.group.empty(count, dtype)
        if dtype == "bfloat16":
            import ml_dtypes

            return np.empty(count, ml_dtypes.bfloat16)
        return super().array(count, dtype, memory)

    def barrier(self) -> Action:
        return self.group.barrier

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        return partial(self.group.all_reduce, array, out=array, wire=wire)

    def exchange(self, operation: str, source: Any, target: Any) -> Action:
        return partial(getattr(self.group, operation), source, out=target)

    def send(self, array: Any, count: int) -> None:
        for _ in range(count):
            self.group.send(array, 1)
        self.group.recv(1, out=self._answer)

    def receive(self, array: Any, count: int) -> Any:
        for _ in range(count):
            self.group.recv(0, out=array)
        self.group.send(self._answer, 0)
        return array

    def close(self) -> None:
        self.group.close()
