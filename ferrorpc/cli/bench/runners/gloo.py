"""torch.distributed with Gloo, on host tensors. It reduces in place only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.cli.bench.case import ORDINARY
from ferrorpc.cli.bench.runners.base import Action, Runner

LIMIT: Final = timedelta(seconds=60)


class GlooRunner(Runner):
    """A rank of the default process group; its place comes from torchrun's variables."""

    name = "Gloo"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        import torch
        import torch.distributed

        self._torch: Any = torch
        self._world: Any = torch.distributed
        torch.set_num_threads(1)
        self._world.init_process_group("gloo", timeout=LIMIT)
        self.rank, self.size = self._world.get_rank(), self._world.get_world_size()
        self.version = f"torch {torch.__version__}"

    def array(self, count: int, dtype: str, memory: str) -> Any:
        if memory != ORDINARY:
            raise self.unable(f"{memory} memory")
        return self._torch.empty(count, dtype=getattr(self._torch, dtype))

    def write(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        array.copy_(self._torch.from_numpy(values))

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = array.to(self._torch.float32, copy=True).numpy()
        return found

    def barrier(self) -> Action:
        action: Action = self._world.barrier
        return action

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        if wire is not None:
            raise self.unable(f"{wire} messages")
        return partial(self._world.all_reduce, array)

    def send(self, array: Any, count: int) -> None:
        for _ in range(count):
            self._world.send(array, 1)
        self._world.recv(self._torch.empty(1), 1)

    def receive(self, array: Any, count: int) -> Any:
        for _ in range(count):
            self._world.recv(array, 0)
        self._world.send(self._torch.zeros(1), 0)
        return array

    def close(self) -> None:
        self._world.destroy_process_group()
