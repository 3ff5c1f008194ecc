"""MPICH through mpi4py, on NumPy arrays; both are available as wheels. Sums are in place, which is also faster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ferrorpc.cli.bench.case import ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from ferrorpc.cli.bench.runners.base import Action, Runner
from ferrorpc.errors import BackendUnavailableError


class MpichRunner(Runner):
    """A rank of COMM_WORLD, started by mpiexec."""

    name = "MPICH"

    def __init__(self, settings: Mapping[str, str]) -> None:
        from mpi4py import MPI  # importing it initialises MPI

        self._in_place = MPI.IN_PLACE
        self._finalize = MPI.Finalize
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        name, numbers = MPI.get_vendor()
        if name != "MPICH":
            raise BackendUnavailableError(f"mpi4py found {name}, not MPICH", "pip install mpich, in an environment of its own")
        self.version = f"MPICH {'.'.join(map(str, numbers))}"

    def array(self, count: int, dtype: str, memory: str) -> Any:
        if dtype == "bfloat16":
            raise self.unable(dtype)
        return super().array(count, dtype, memory)

    def barrier(self) -> Action:
        return partial(self._world.Barrier)

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        if wire is not None:
            raise self.unable(f"{wire} messages")
        return partial(self._world.Allreduce, self._in_place, array)

    def exchange(self, operation: str, source: Any, target: Any) -> Action:
        if operation == BROADCAST:
            return partial(self._world.Bcast, source)
        names = {ALL_GATHER: "Allgather", REDUCE_SCATTER: "Reduce_scatter_block", ALL_TO_ALL: "Alltoall"}
        return partial(getattr(self._world, names[operation]), source, target)

    def close(self) -> None:
        self._finalize()
