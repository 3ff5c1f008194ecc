"""torch.distributed with Gloo, on host tensors. It reduces in place only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed

from ferrorpc.cli.bench.runners.base import Action, Runner

LIMIT: Final = timedelta(seconds=60)


class GlooRunner(Runner):
    """A rank of the default process group; its place comes from torchrun's variables."""

    name = "Gloo"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=LIMIT)
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.version = f"torch {torch.__version__}"

    def array(self, count: int, dtype: str, memory: str) -> Any:
        super().array(0, "float32", memory)
        return torch.empty(count, dtype=getattr(torch, dtype))

    def write(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        array.copy_(torch.from_numpy(values))

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = array.to(torch.float32, copy=True).numpy()
        return found

    def barrier(self) -> Action:
        action: Action = torch.distributed.barrier
        return action

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        if wire is not None:
            raise self.unable(f"{wire} messages")
        return partial(torch.distributed.all_reduce, array)

    def send(self, array: Any, count: int) -> None:
        for _ in range(count):
            torch.distributed.send(array, 1)
        torch.distributed.recv(torch.empty(1), 1)

    def receive(self, array: Any, count: int) -> Any:
        for _ in range(count):
            torch.distributed.recv(array, 0)
        torch.distributed.send(torch.zeros(1), 0)
        return array

    def close(self) -> None:
        torch.distributed.destroy_process_group()
