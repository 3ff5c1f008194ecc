"""What operations of a group have in common: prepared calls are kept, and not for ever."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet, ref

import numpy as np

from ferrorpc import ProcessGroup
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Prepared
from ferrorpc.operations.dispatch import PREPARED_CALLS, Dispatch
from ferrorpc.testing import run_world


def test_the_calls_prepared_last_are_kept_and_no_more_of_them_than_a_program_needs() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    dispatch = Dispatch(backend, 20.0)
    alive: WeakSet[Prepared] = WeakSet()

    def prepared(number: int) -> Prepared:
        return dispatch.prepared((number,), lambda: Call(Operation.BARRIER))

    for number in range(2 * PREPARED_CALLS):
        alive.add(prepared(number))
    assert len(alive) == PREPARED_CALLS
    assert prepared(2 * PREPARED_CALLS - 1) in alive
    assert prepared(0) not in alive
    backend.close()


def test_a_group_holds_nothing_of_an_asynchronous_operation_that_is_over() -> None:
    def body(group: ProcessGroup) -> Any:
        work = group.all_reduce(np.ones(4), async_op=True)
        work.wait()
        group.synchronize()
        held = ref(work)
        del work
        gc.collect()
        return held()

    assert run_world(2, body) == [None, None]
