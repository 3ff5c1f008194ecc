"""How a communicator ends whose ranks read each other's GPU memory: that is closed only behind the last read of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.cupy_ipc import CupyIpc
from ferrorpc.backends.cuda_ipc.control_block import CLOSED, got, left
from ferrorpc.backends.device.communicator import DataType, Op
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.threads import in_threads, results_of
from tests.waiting import eventually

pytestmark = pytest.mark.shared_memory


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), RuntimeError("of a handler")], ids=["interrupt", "error"])
@pytest.mark.parametrize(("operation", "behind"), [("rounds", left(0)), ("messages", got(1, 0))])
def test_a_read_of_a_peers_memory_that_broke_off_before_its_event_is_over_before_that_memory_is_closed(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, operation: str, behind: int, problem: BaseException
) -> None:
    record = CupyIpc.record

    def struck(ipc: CupyIpc, event: int, stream: int) -> None:
        if event == ends[0]._own.events[behind]:
            raise problem
        record(ipc, event, stream)

    with ipc_backends(cupy, 2) as backends:
        ends: list[Any] = [backend.context.program.communicator for backend in backends]
        x, streams = cupy.asarray(np.ones(4, np.float32)), [cupy.cuda.Stream(non_blocking=True) for _ in ends]

        def begin(rank: int) -> None:
            stream = streams[rank].ptr
            if operation == "rounds":
                ends[rank].all_reduce(x.data.ptr, x.data.ptr, 4, DataType.FLOAT32, Op.SUM, stream)
            elif rank == 0:
                ends[0].recv(x.data.ptr, 4, DataType.FLOAT32, 1, stream)
            else:
                ends[1].send(x.data.ptr, 4, DataType.FLOAT32, 0, stream)

        def end(rank: int) -> None:
            if rank == 1:  # whose wait for its own reads would advance the GPU
                eventually(lambda: ends[0]._own.words[CLOSED], "rank 0 has closed the other's memory")
            ends[rank].abort()

        monkeypatch.setattr(CupyIpc, "record", struck)
        begin(1)
        with pytest.raises(type(problem)):
            begin(0)
        results_of(in_threads(2, end))
