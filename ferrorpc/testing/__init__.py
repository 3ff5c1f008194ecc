"""The public testing kit: runs all ranks of a job in one process, in virtual time, with injected faults.

    from ferrorpc.testing import FaultPlan, run_world
    results = run_world(4, lambda group: group.all_reduce(x), faults=FaultPlan(delay_seconds=(0, 0.01)), seed=7)

A run that fails fails again in the same way with the same seed. The contract suites need pytest.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrorpc.testing.contract import BackendContract as BackendContract, BasicBackendContract as BasicBackendContract
    from ferrorpc.testing.faults import FaultPlan as FaultPlan, Kill as Kill, Pause as Pause, RankKilled as RankKilled
    from ferrorpc.testing.manual_clock import ManualClock as ManualClock
    from ferrorpc.testing.rank_threads import run_groups as run_groups
    from ferrorpc.testing.virtual_clock import VirtualClock as VirtualClock
    from ferrorpc.testing.world import World as World, run_world as run_world

_MODULE_OF = {
    "run_world": "world",
    "World": "world",
    "run_groups": "rank_threads",
    "FaultPlan": "faults",
    "Kill": "faults",
    "Pause": "faults",
    "RankKilled": "faults",
    "VirtualClock": "virtual_clock",
    "ManualClock": "manual_clock",
    "BackendContract": "contract",
    "BasicBackendContract": "contract",
}

# Without the contract suites, so that `import *` needs no pytest; as a plain list, because checkers compute nothing.
__all__ = [
    "run_world",
    "World",
    "run_groups",
    "FaultPlan",
    "Kill",
    "Pause",
    "RankKilled",
    "VirtualClock",
    "ManualClock",
]


if not TYPE_CHECKING:  # a checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'ferrorpc.testing' has no attribute {name!r}")
        value = getattr(_import_module(f"ferrorpc.testing.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
