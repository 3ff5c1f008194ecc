"""The environment variables of each worker: ferrorpc's own, and those that torchrun sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ferrorpc.cli.launcher.plan import Plan
from ferrorpc.cli.system import available_cpus
from ferrorpc.config import GIVEN_VARIABLE, PREFIX

_TORCH: Final = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
_FERRORPC: Final = ("COORDINATOR", "JOB", "NAME", "WORLD_SIZE", "RANK_HINT")
_REPLACED: Final = frozenset((*_TORCH, *(PREFIX + name for name in _FERRORPC)))
"""Never inherited: an outer launcher may have set them."""
_OF_JOB: Final = tuple(PREFIX + name for name in (*_FERRORPC, "HTTP_PORT"))
_MEETING_PLACE: Final = frozenset((PREFIX + "COORDINATOR", PREFIX + "JOB"))


def launcher_environment(base: Mapping[str, str], *, joins: bool) -> dict[str, str]:
    """The variables that a launcher goes by: in a worker of another launcher without those of that worker's job.

    What the worker has set itself, to another value than it was given, counts.

    Args:
        base: this process's variables.
        joins: whether flags name a coordinator or a job; those that they leave out are then the worker's.
    """
    given = base.get(GIVEN_VARIABLE, "").split()
    return {name: value for name, value in base.items() if f"{name}={value}" not in given or (joins and name in _MEETING_PLACE)}


def given_settings(environment: Mapping[str, str]) -> str:
    """The value of GIVEN_VARIABLE for a worker with these variables."""
    return " ".join(f"{name}={environment[name]}" for name in _OF_JOB if name in environment)


def worker_environment(plan: Plan, worker: int, attempt: int, base: Mapping[str, str], errors_dir: Path) -> dict[str, str]:
    """The whole environment of worker number `worker` of this node: `base` and the launcher's own variables.

    In an elastic world, or without a node rank, ranks are not known before the rendezvous. RANK, WORLD_SIZE and the like are
    then not set, and removed if they are in `base`.

    TORCHELASTIC_USE_AGENT_STORE is never set: torch's rank 0 hosts its own store on MASTER_PORT.
    """
    environment = {name: value for name, value in base.items() if name not in _REPLACED}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cpus() // plan.processes)))
    environment.update(_ferrorpc(plan, worker), **_torch(plan, worker, attempt, errors_dir))
    # A fork after gRPC has started kills the child process. The variable takes effect only if set before `import grpc`.
    environment.update(GRPC_ENABLE_FORK_SUPPORT="0", PYTHONUNBUFFERED="1")
    return environment


def _ferrorpc(plan: Plan, worker: int) -> dict[str, str]:
    low, high = plan.world
    found = {
        "FERRORPC_COORDINATOR": plan.coordinator,
        "FERRORPC_JOB": plan.job,
        "FERRORPC_NAME": plan.name(worker),
        "FERRORPC_WORLD_SIZE": str(high) if low == high else f"{low}:{high}",
    }
    if plan.elastic and plan.node_rank is not None:
        found["FERRORPC_RANK_HINT"] = str(plan.node_rank * plan.processes + worker)
    return found


def _torch(plan: Plan, worker: int, attempt: int, errors_dir: Path) -> dict[str, str]:
    found = {
        "LOCAL_RANK": str(worker),
        "LOCAL_WORLD_SIZE": str(plan.processes),
        "ROLE_NAME": plan.role,
        "MASTER_ADDR": plan.master[0],
        "MASTER_PORT": str(plan.master[1]),
        "TORCHELASTIC_RUN_ID": plan.job,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.policy.max_restarts),
        "TORCHELASTIC_ERROR_FILE": str(errors_dir / f"{plan.name(worker)}.json"),
    }
    rank = plan.rank(worker)
    if rank is not None:
        world = str(plan.world[1])
        found.update(RANK=str(rank), WORLD_SIZE=world, ROLE_RANK=str(rank), ROLE_WORLD_SIZE=world)
        found.update(GROUP_RANK=str(plan.node_rank), GROUP_WORLD_SIZE=str(plan.nodes[1]))
    return found
