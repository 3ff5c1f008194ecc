"""Worlds of ranks with fake GPUs and a fake NCCL, in threads of this process."""

from __future__ import annotations

from typing import Any

from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.backends.simulated import Networks, SimulatedBackend
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.threads import in_threads, results_of

SECONDS = 30.0


def sessions(size: int) -> list[LocalSession]:
    """The seats of a world in real time."""
    world = LocalWorld(size, clock=SYSTEM_CLOCK, timeout=SECONDS)
    return [world.session(rank) for rank in range(size)]


def host_lanes(size: int) -> list[SimulatedBackend]:
    """The ranks' backends for host memory."""
    lanes = Networks(SYSTEM_CLOCK, None, 0)
    return [SimulatedBackend(session, lanes, SECONDS) for session in sessions(size)]


def nccl_backends(
    cupy: StandIn, size: int, world: FakeNccl | None = None, kind: type[DeviceBackend] = NcclBackend, **options: Any
) -> list[DeviceBackend]:
    """One for each rank, each on a GPU of its own."""
    nccl = FakeNccl(cupy.machine) if world is None else world
    lanes = host_lanes(size)

    def make(rank: int) -> DeviceBackend:
        return kind(lanes[rank], device_of(cupy, rank), nccl.api(rank), **options)

    return results_of(in_threads(size, make))
