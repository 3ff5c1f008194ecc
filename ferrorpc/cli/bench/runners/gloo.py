"""torch.distributed with Gloo, on CPU tensors. Reductions are in place only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

from ferrorpc.cli.bench.case import ALL_GATHER, BROADCAST, REDUCE_SCATTER
from ferrorpc.cli.bench.runners.base import Action
from ferrorpc.cli.bench.runners.tensors import TensorRunner

LIMIT: Final = timedelta(seconds=60)


class GlooRunner(TensorRunner):
    """A rank of the default process group, set up from torchrun's variables."""

    name = "Gloo"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        import torch.distributed

        self._world: Any = torch.distributed
        self._world.init_process_group("gloo", timeout=LIMIT)
        self.rank, self.size = self._world.get_rank(), self._world.get_world_size()
        self.version = f"torch {self._torch.__version__}"

    def barrier(self) -> Action:
        return partial(self._world.barrier)

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        if wire is not None:
            raise self.unable(f"{wire} messages")
        return partial(self._world.all_reduce, array)

    def exchange(self, operation: str, source: Any, target: Any) -> Action:
        world, size = self._world, self.size
        if operation == BROADCAST:
            return partial(world.broadcast, source, 0)
        if operation == ALL_GATHER:
            return partial(world.all_gather, list(target.chunk(size)), source)
        if operation == REDUCE_SCATTER:
            return partial(world.reduce_scatter, target, list(source.chunk(size)))
        return partial(world.all_to_all_single, target, source)

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
