"""A world of process groups in one process that record their operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrorpc.backends.base import Backend
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.execution import Execution
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups


class WatchedGroup(ProcessGroup):
    """One rank's group. `calls`: the labels of the operations it has started."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, timeout=60.0)
        self.calls: list[str] = []
        run, submit = backend.run, backend.submit

        def watched_run(execution: Execution) -> Any:
            self.calls.append(execution.label)
            return run(execution)

        def watched_submit(execution: Execution, convert: Callable[[Execution], Any]) -> Any:
            self.calls.append(execution.label)
            return submit(execution, convert)

        backend.run, backend.submit = watched_run, watched_submit


def run_world(size: int, body: Callable[[WatchedGroup], Any]) -> list[Any]:
    """Runs body(group) on every rank, each on its own thread. Returns the results in rank order."""
    return run_groups([WatchedGroup(backend) for backend in SimulatedBackend.create_group(size)], body)
