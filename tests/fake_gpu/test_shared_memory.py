"""Arrays on GPUs in collectives in shared memory that begin once the whole array is on the host."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.integration.test_grpc_backend import GrpcWorld

SECONDS = 60.0

pytestmark = pytest.mark.shared_memory


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "all_gather", "all_to_all"])
def test_the_caller_does_not_wait_for_its_gpu_and_the_deadline_holds(cupy: StandIn, call: str) -> None:
    other_has_begun = threading.Event()  # else the deadline might have passed before it calls, which would raise then

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            x, stuck = cupy.asarray(np.ones(64, np.float32)), cupy.cuda.Stream(non_blocking=True)
            if group.rank == 0:
                stuck.fake.enqueue(lambda: False)
                assert other_has_begun.wait(SECONDS)
            options: dict[str, Any] = {"root": 1} if call == "reduce" else {}
            with stuck:
                work = getattr(group, call)(x, async_op=True, timeout=0.4 if group.rank == 0 else SECONDS, **options)
            if group.rank == 1:
                other_has_begun.set()
            expected = CollectiveTimeoutError if group.rank == 0 else GroupAbortedError
            with pytest.raises(expected, match="this rank's own GPU") as raised:
                work.wait()
            assert group.rank or raised.value.fields["waiting_on"] == []
            stuck.fake.tasks.clear()

    with GrpcWorld(2, transport="shared_memory") as world:
        run_groups([ProcessGroup(backend, SECONDS) for backend in world.backends], body)
