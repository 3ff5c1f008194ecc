"""Worlds of ranks that share one GPU and the memory of one host, in threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.cuda_ipc.backend import CudaIpcBackend
from tests.integration.test_grpc_backend import GrpcWorld
from tests.threads import in_threads, results_of


@contextmanager
def ipc_backends(
    cupy: Any, size: int, *, apart: bool = True, slot_bytes: int = 1 << 16, **options: Any
) -> Iterator[list[CudaIpcBackend]]:
    """One for each rank, all of them on GPU 0.

    Args:
        slot_bytes: little, for what fakes allocate they write to.
        apart: whether ranks open each other's memory by handles, as processes must and threads of a real one cannot.
    """
    with GrpcWorld(size, transport="shared_memory") as world:

        def make(rank: int) -> CudaIpcBackend:
            process = f"process-{rank if apart else 0}"
            return CudaIpcBackend(world.backends[rank], device_of(cupy, 0), slot_bytes=slot_bytes, process=process, **options)

        yield results_of(in_threads(size, make))
