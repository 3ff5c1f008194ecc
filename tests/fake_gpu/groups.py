"""Groups over NCCL on every rank of a world, with what was made for them, and how they end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import FerroError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.worlds import nccl_backends
from tests.threads import in_threads
from tests.waiting import eventually

SECONDS = 30.0


class Ranks:
    """Groups over NCCL, and what was made for them."""

    def __init__(self, cupy: StandIn, size: int, kind: type[DeviceBackend] = NcclBackend) -> None:
        self.cupy = cupy
        self.nccl = FakeNccl(cupy.machine)
        self.backends = nccl_backends(cupy, size, self.nccl, kind)
        self.groups = [ProcessGroup(backend, timeout=SECONDS) for backend in self.backends]

    def run(self, body: Any) -> list[Any]:
        def on_rank(rank: int) -> Any:
            with self.cupy.cuda.Device(rank):
                return body(self.groups[rank])

        return in_threads(len(self.groups), on_rank)

    def array(self, count: int = 4) -> Any:
        return self.cupy.asarray(np.ones(count, np.float32))

    def wait_for_aborts(self) -> None:
        """All communicators are aborted soon after a generation has ended."""
        ends = [end for meeting in self.nccl.meetings.values() for end in meeting.ends.values()]
        eventually(lambda: all(end.aborted for end in ends), "all communicators are aborted", SECONDS)


def end_of(group: ProcessGroup, cause: type[FerroError]) -> FerroError:
    """The group's first cause, as soon as it is there, which every later call raises too."""
    parker = SYSTEM_CLOCK.parker()
    group._backend.latch.watch(parker.unpark)
    while group._backend.latch.cause is None:
        assert parker.park(SYSTEM_CLOCK.now() + SECONDS), "nothing ended the generation"
    with pytest.raises(cause) as raised:
        group.barrier()
    return raised.value
