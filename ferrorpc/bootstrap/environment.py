"""Reads from environment variables how this process was launched: its world, rank and node. Pure.

Every launcher sets variables of its own. They are looked for in this order, and the first that are set win: ferrorpc's own
(with which a launcher's rank may be combined), torchrun's, those of Kubeflow's trainer (PET_*), SLURM's, those of MPI
launchers, and the index of a Kubernetes Job. Without any of them this is a world of one. In a worker of `ferrorpc run` only
what that sets counts: the variables of SLURM, MPI and the like that it inherits describe the launcher, one for all its workers.

A launcher's rank needs the size of its world. A size without a rank is an error only where nothing else says more.

A rank from a launcher with a fixed world is *pinned*: the process gets it or is refused. FERRORPC_RANK_HINT and the index of a
Job are *hints*: the process gets that rank if it is free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ferrorpc.config import LAUNCH_VARIABLE, plain_name, whole_number
from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import join_address

Environment = Mapping[str, str]
NO_LAUNCHER: Final = "nothing"
"""The source of a world of one whose environment says nothing about ranks."""


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """How one process was launched.

    Attributes:
        source: names of the variables that were read, for the log.
        world: fewest and most members.
        pinned_rank: the rank it must have.
        hinted_rank: the rank it would like.
        local_rank: its number among the processes of its node; None if unknown.
        node: number of its node; None if unknown.
        local_size: how many processes its node has; None if unknown.
        master: host of rank 0; empty if unknown.
        run_id: distinguishes this run of the launcher from others; empty if unknown.
        launcher_variable: for a launcher without run ids, a variable that its ranks have and it itself has not.
    """

    source: str
    world: tuple[int, int]
    pinned_rank: int | None = None
    hinted_rank: int | None = None
    local_rank: int | None = None
    node: int | None = None
    local_size: int | None = None
    master: str = ""
    run_id: str = ""
    launcher_variable: str = ""

    def __str__(self) -> str:
        """In words, for the log."""
        if self.source == NO_LAUNCHER:
            return "a world of one: no launcher's variables are set"
        sizes = " to ".join(map(str, sorted(set(self.world))))
        if self.pinned_rank is not None:
            return f"rank {self.pinned_rank} of {sizes}, from {self.source}"
        wish = "" if self.hinted_rank is None else f", rank {self.hinted_rank} if it is free"
        return f"a world of {sizes}{wish}, from {self.source}"

    @property
    def one_node(self) -> bool:
        """Whether all processes are known to run on one node."""
        return self.local_size == self.world[1]


def detect_launch(environment: Environment, config: Mapping[str, Any]) -> LaunchInfo:
    """How this process was launched.

    Args:
        environment: `os.environ`, or a stand-in. An empty variable counts as not set.
        config: the settings coordinator, world_size and rank_hint.

    Raises:
        ConfigError: variables contradict each other or are incomplete; the message names them.
    """
    environment = {name: value for name, value in environment.items() if value}
    ours = LAUNCH_VARIABLE in environment
    launchers = (_torchrun,) if ours else _LAUNCHERS
    launched = next((launch for launch in (read(environment) for read in launchers) if launch is not None), None)
    hint = config["rank_hint"]
    if config["world_size"] is not None:
        index = None if ours else _number(environment, _INDEX)
        local = _number(environment, "LOCAL_RANK")
        return _with_world_size(config["world_size"], launched, index if hint is None else hint, local)
    if launched is not None:
        return replace(launched, hinted_rank=hint)
    _require_nothing_left(environment)
    if config["coordinator"] is not None:
        raise ConfigError("a coordinator is named, but not how many members its job has", hint="set FERRORPC_WORLD_SIZE")
    return LaunchInfo(NO_LAUNCHER, (1, 1))


def member_name(environment: Environment, config: Mapping[str, Any], launch: LaunchInfo, host: str, process: int) -> str:
    """The member's name: the setting, else node and local rank, else the pod's name, else host and process id.

    If the name stays the same over restarts, a restarted process can take over from the one that it replaces.
    """
    if config["name"]:
        return str(config["name"])
    if launch.local_rank is not None:
        return f"{host}-{launch.local_rank}" if not launch.node else f"{host}.{launch.node}-{launch.local_rank}"
    return environment.get("POD_NAME") or _pods_host_name(environment, config["job"]) or f"{host}-{process}"


def _pods_host_name(environment: Environment, job: str) -> str | None:
    """The host name of a pod. In an Indexed Job that is <job>-<index>, unless the pod uses its node's network and host name."""
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    name, index = environment.get("HOSTNAME"), environment.get(_INDEX)
    return f"{job}-{index}" if name and index and not name.endswith(f"-{index}") else name


def run_label(environment: Environment, launch: LaunchInfo) -> dict[str, str]:
    """The label by which the coordinator keeps apart runs of `ferrorpc run` that use one job by mistake.

    Empty unless the world is fixed and all of it was started by one launcher: others may have members of several.
    """
    run, slash, _ = environment.get(LAUNCH_VARIABLE, "").partition("/")
    return {"run": run} if slash and launch.one_node and launch.world[0] == launch.world[1] else {}


def job_named_after(run_id: str) -> str:
    """The name of the job of a launcher's run. Launchers allow names of runs that no job may have."""
    try:
        return plain_name(f"run-{run_id}")
    except ValueError:
        return f"run-{hashlib.sha256(run_id.encode(errors='surrogateescape')).hexdigest()[:16]}"


def own_coordinator_address(launch: LaunchInfo, port: int) -> str:
    """host:port of the coordinator that rank 0 starts if none is named.

    Raises:
        ConfigError: the rank of this process or the host of rank 0 is unknown.
    """
    if launch.pinned_rank is None:
        hint = f"start the script with `ferrorpc run -n {launch.world[1]}`, or set FERRORPC_COORDINATOR=HOST:PORT"
        raise ConfigError(f"a world of {launch.world[1]} members needs a coordinator, and none is named", hint=hint)
    host = "127.0.0.1" if launch.one_node else launch.master
    if not host:
        raise ConfigError(f"nothing in {launch.source} says where rank 0 is", hint="set FERRORPC_COORDINATOR, or MASTER_ADDR")
    return join_address(host, port)


def _require_nothing_left(environment: Environment) -> None:
    """Raises ConfigError if there are other processes, according to a variable that says no more than that."""
    for present, absent in _HALVES.items():
        if present in environment and absent not in environment:
            hint = f"set FERRORPC_WORLD_SIZE, to 1 where every process works for itself; or unset {present}"
            raise ConfigError(f"{present} is set, but {absent} is not", hint=hint)


def _with_world_size(
    world: tuple[int, int], launched: LaunchInfo | None, hint: int | None, local_rank: int | None
) -> LaunchInfo:
    """With FERRORPC_WORLD_SIZE set: a launcher's rank is pinned if its world is the same fixed one, and otherwise a hint."""
    if launched is None:
        return LaunchInfo("FERRORPC_WORLD_SIZE", world, hinted_rank=hint, local_rank=local_rank)
    same = launched.world == world
    return replace(
        launched,
        source=f"FERRORPC_WORLD_SIZE, {launched.source}",
        world=world,
        pinned_rank=launched.pinned_rank if same else None,
        hinted_rank=launched.pinned_rank if hint is None and not same else hint,
    )


# -- launchers -------------------------------------------------------------------------------------------------------------


def _torchrun(environment: Environment, prefix: str = "") -> LaunchInfo | None:
    """Reads RANK, WORLD_SIZE and the rest, with this prefix."""
    rank_name, size_name, master_name = f"{prefix}RANK", f"{prefix}WORLD_SIZE", f"{prefix}MASTER_ADDR"
    if rank_name not in environment:
        return None
    rank, size = _rank_and_size(environment, rank_name, size_name)
    return LaunchInfo(
        f"{rank_name} and {size_name}",
        (size, size),
        rank,
        local_rank=_number(environment, f"{prefix}LOCAL_RANK"),
        node=_number(environment, f"{prefix}GROUP_RANK"),
        local_size=_number(environment, f"{prefix}LOCAL_WORLD_SIZE"),
        master=environment.get(master_name, ""),
        run_id=_torchrun_id(environment) or _join_values(environment, master_name, f"{prefix}MASTER_PORT"),
    )


def _torchrun_id(environment: Environment) -> str:
    """The name of torchrun's run; torchrun sets "none" if it was given none."""
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def _kubeflow(environment: Environment) -> LaunchInfo | None:
    """The variables with which a pod would start torchrun, in a process started without torchrun; or PET_RANK and the like."""
    if "PET_NNODES" not in environment:
        return _torchrun(environment, "PET_")
    nodes, each = _number(environment, "PET_NNODES") or 1, _number(environment, "PET_NPROC_PER_NODE") or 1
    node, local = _number(environment, "PET_NODE_RANK"), _number(environment, "LOCAL_RANK")
    local = 0 if local is None and each == 1 else local
    rank = None if node is None or local is None else node * each + local
    if rank is not None and rank >= nodes * each:
        raise ConfigError(
            f"PET_NODE_RANK={node} is not below PET_NNODES={nodes}", hint=f"number the nodes from 0 to {nodes - 1}"
        )
    return LaunchInfo(
        "PET_NNODES and PET_NPROC_PER_NODE",
        (nodes * each, nodes * each),
        rank,
        local_rank=local,
        node=node,
        local_size=each,
        master=environment.get("PET_MASTER_ADDR", ""),
        run_id=environment.get("PET_RDZV_ID") or _join_values(environment, "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    )


def _slurm(environment: Environment) -> LaunchInfo | None:
    """A step has its own number of tasks. The batch script of a job, and the shell of salloc, have some of these variables too,
    but run alone."""
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    alone = environment.get("ENVIRONMENT") == "BATCH" or environment.keys().isdisjoint(("SLURM_NTASKS", "SLURM_STEP_ID"))
    if "SLURM_PROCID" not in environment or (tasks == "SLURM_NTASKS" and alone):
        return None
    rank, size = _rank_and_size(environment, "SLURM_PROCID", tasks)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return LaunchInfo(
        f"SLURM_PROCID and {tasks}",
        (size, size),
        rank,
        local_rank=_number(environment, "SLURM_LOCALID"),
        node=_number(environment, "SLURM_NODEID"),
        local_size=size if environment.get("SLURM_STEP_NUM_NODES") == "1" else None,
        master=environment.get("MASTER_ADDR") or first_host(nodes),
        run_id=_join_values(environment, "SLURM_JOB_ID", "SLURM_STEP_ID"),
    )


def _open_mpi(environment: Environment) -> LaunchInfo | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    rank, size = _rank_and_size(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return LaunchInfo(
        "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
        (size, size),
        rank,
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        master=environment.get("MASTER_ADDR", ""),
        run_id=environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", ""),
    )


def _pmi(environment: Environment) -> LaunchInfo | None:
    if "PMI_RANK" not in environment:
        return None
    rank, size = _rank_and_size(environment, "PMI_RANK", "PMI_SIZE")
    return LaunchInfo(
        "PMI_RANK and PMI_SIZE",
        (size, size),
        rank,
        local_rank=_number(environment, "MPI_LOCALRANKID"),
        local_size=_number(environment, "MPI_LOCALNRANKS"),
        master=environment.get("MASTER_ADDR", ""),
        launcher_variable="PMI_RANK",
    )


_INDEX: Final = "JOB_COMPLETION_INDEX"
_HALVES: Final = {
    "WORLD_SIZE": "RANK",
    "PET_WORLD_SIZE": "PET_RANK",
    "PET_NODE_RANK": "PET_NNODES",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    _INDEX: "FERRORPC_WORLD_SIZE",
    "LOCAL_RANK": "FERRORPC_WORLD_SIZE",
}
"""Variables that alone say that there are other processes, but not which rank of how many this one is; and what is missing."""
_LAUNCHERS: Final[tuple[Callable[[Environment], LaunchInfo | None], ...]] = (_torchrun, _kubeflow, _slurm, _open_mpi, _pmi)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],login1" begins with gpu07."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    return head + re.split(r"[-,\]]", rest, maxsplit=1)[0]


def _number(environment: Environment, name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return whole_number(text)
    except ValueError as error:
        hint = f"correct {name}, or set FERRORPC_WORLD_SIZE and unset it"
        raise ConfigError(f"{name}={text!r}: {error}", hint=hint) from None


def _rank_and_size(environment: Environment, rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank is None or size is None:
        hint = f"set {size_name} as well, or unset {rank_name}"
        raise ConfigError(f"{rank_name} is set, but {size_name} is not", hint=hint)
    if rank >= size:
        raise ConfigError(f"{rank_name}={rank} is not below {size_name}={size}", hint="ranks count from 0")
    return rank, size


def _join_values(environment: Environment, *names: str) -> str:
    return ".".join(environment[name] for name in names if environment.get(name))
