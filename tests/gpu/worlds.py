"""Worlds of ranks with fake GPUs and a fake NCCL, in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ferrorpc.arrays.cupy_device import device_of
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.backends.simulated import Lanes, SimulatedBackend
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.errors import FerroError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn

SECONDS = 20.0


def on_every_rank(count: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns or raises, each on a thread."""
    outcomes: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except FerroError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def sessions(size: int) -> list[LocalSession]:
    """The seats of a world in real time."""
    world = LocalWorld(size, clock=SYSTEM_CLOCK, timeout=SECONDS)
    return [world.session(rank) for rank in range(size)]


def host_lanes(size: int) -> list[SimulatedBackend]:
    """The ranks' backends for host memory."""
    lanes = Lanes(SYSTEM_CLOCK, None, 0)
    return [SimulatedBackend(session, lanes, SECONDS) for session in sessions(size)]


def nccl_backends(
    cupy: StandIn, size: int, world: FakeNccl | None = None, kind: type[NcclBackend] = NcclBackend, **options: Any
) -> list[NcclBackend]:
    """One for each rank, each on a GPU of its own."""
    nccl = FakeNccl(cupy.machine) if world is None else world
    lanes = host_lanes(size)

    def make(rank: int) -> NcclBackend:
        return kind(lanes[rank], device_of(cupy, rank), nccl.api(rank), **options)

    found = on_every_rank(size, make)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found
