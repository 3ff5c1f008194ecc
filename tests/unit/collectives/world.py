"""A simulated world that runs one call on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.execution import Prepared
from ferrorpc.collectives.prepared import PlanPrepared
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key


def run(
    calls: Sequence[Call],
    inputs: Sequence[list[np.ndarray]],
    outputs: Sequence[list[np.ndarray]] | None = None,
    build: Callable[[Call, int, int], Plan] | None = None,
) -> list[list[np.ndarray]]:
    """Each rank's results, in the arrays of `outputs` where given, by the plans of `build` or those that are chosen."""
    backends = SimulatedBackend.create_group(len(calls))

    def body(rank: int) -> list[np.ndarray]:
        backend, call = backends[rank], calls[rank]
        guard = Guard(backend.clock, backend.latch, 20.0)
        prepared = backend.prepare(call) if build is None else planned(backend, call, build(call, rank, len(calls)))
        return backend.run(prepared.start(Key(0, 0, 1), inputs[rank], outputs and outputs[rank], guard))

    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(body, range(len(calls))))
    finally:
        for backend in backends:
            backend.close()


def planned(backend: SimulatedBackend, call: Call, plan: Plan) -> Prepared:
    """This call with this plan."""
    return PlanPrepared(backend.transport, backend.world_ranks, backend.rank, call, plan, lambda ranks: "")
