"""Where this process stands in its job, as its environment says. Pure: variables in, a `Place` out.

Launchers tell their processes in different words. They are asked in this order, and the first that speaks wins: ferrorpc's
own variables (which a launcher's rank may complete), torchrun's, those of Kubeflow's trainer (PET_*), SLURM's, MPI
launchers', and the index of a Kubernetes Job. When nobody speaks this is a world of one.

A rank from a launcher with a fixed world is *pinned*: given as it is, or refused. FERRORPC_RANK_HINT and the index of a
Job are *hints*: given where they are free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import join_address

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """One process's place.

    Attributes:
        source: whose word this is, for the log.
        world: fewest and most members.
        pinned_rank: the rank it must have.
        hinted_rank: the rank it would like.
        local_rank: its number among the processes of its node; None when nobody said.
        node: number of its node; None when nobody said.
        local_size: how many processes its node has; None when nobody said.
        master: host of rank 0; empty when nobody said.
        run: what tells this run of the launcher from others; empty when nobody said.
        launched_with: where nobody can say that: a variable that all processes of the launcher have, and it has not.
    """

    source: str
    world: tuple[int, int]
    pinned_rank: int | None = None
    hinted_rank: int | None = None
    local_rank: int | None = None
    node: int | None = None
    local_size: int | None = None
    master: str = ""
    run: str = ""
    launched_with: str = ""

    @property
    def one_node(self) -> bool:
        """Whether all processes are known to be on one node."""
        return self.local_size is not None and self.local_size == self.world[1]


def detect(environment: Environment, config: Mapping[str, Any]) -> Place:
    """The place of this process.

    Args:
        environment: `os.environ`, or what is to be read in its stead. A variable that is empty is not set.
        config: the settings coordinator, world_size and rank_hint.

    Raises:
        ConfigError: what is said contradicts itself or is incomplete; the variables are named.
    """
    environment = {name: value for name, value in environment.items() if value}
    launched = next((place for place in (ask(environment) for ask in _LAUNCHERS) if place is not None), None)
    hint = config["rank_hint"]
    if config["world_size"] is not None:
        index = _number(environment, _INDEX)
        local = _number(environment, "LOCAL_RANK")
        return _own(config["world_size"], launched, index if hint is None else hint, local)
    if launched is not None:
        return replace(launched, hinted_rank=hint)
    if _INDEX in environment:
        hint = "set FERRORPC_WORLD_SIZE; to 1 where every process works for itself"
        raise ConfigError(f"{_INDEX} is set, but nothing says how many processes there are", hint=hint)
    if config["coordinator"] is not None:
        raise ConfigError("a coordinator is named, but not how many members its job has", hint="set FERRORPC_WORLD_SIZE")
    return Place("nothing", (1, 1))


def member_name(environment: Environment, config: Mapping[str, Any], place: Place, host: str, process: int) -> str:
    """The member's name: its setting, else node and local rank, else the pod's, else host and process.

    A name that stays the same over restarts lets the replacement take over from the process it replaces.
    """
    if config["name"]:
        return str(config["name"])
    if place.local_rank is not None:
        return f"{host}-{place.local_rank}" if not place.node else f"{host}.{place.node}-{place.local_rank}"
    return environment.get("POD_NAME") or _pods_host_name(environment, config["job"]) or f"{host}-{process}"


def _pods_host_name(environment: Environment, job: str) -> str | None:
    """The host name of a pod: in an Indexed Job <job>-<index>, unless the pod has its node's network and with it its name."""
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    name, index = environment.get("HOSTNAME"), environment.get(_INDEX)
    return f"{job}-{index}" if name and index and not name.endswith(f"-{index}") else name


def own_coordinator(place: Place, port: int) -> str:
    """host:port of the coordinator that rank 0 starts when none is named.

    Raises:
        ConfigError: nobody said which process is rank 0, or where it is.
    """
    if place.pinned_rank is None:
        hint = f"start the script with `ferrorpc run -n {place.world[1]}`, or set FERRORPC_COORDINATOR=HOST:PORT"
        raise ConfigError(f"a world of {place.world[1]} members needs a coordinator, and none is named", hint=hint)
    host = "127.0.0.1" if place.one_node else place.master
    if not host:
        raise ConfigError(f"nothing in {place.source} says where rank 0 is", hint="set FERRORPC_COORDINATOR, or MASTER_ADDR")
    return join_address(host, port)


def _own(world: tuple[int, int], launched: Place | None, hint: int | None, local_rank: int | None) -> Place:
    """FERRORPC_WORLD_SIZE speaks. A launcher's rank is pinned where it means the same fixed world, and else a hint."""
    if launched is None:
        return Place("FERRORPC_WORLD_SIZE", world, hinted_rank=hint, local_rank=local_rank)
    same = launched.world == world
    return replace(
        launched,
        source=f"FERRORPC_WORLD_SIZE, {launched.source}",
        world=world,
        pinned_rank=launched.pinned_rank if same else None,
        hinted_rank=launched.pinned_rank if hint is None and not same else hint,
    )


# -- launchers -------------------------------------------------------------------------------------------------------------


def _torchrun(environment: Environment) -> Place | None:
    return _ranked(environment, "")


def _ranked(environment: Environment, prefix: str) -> Place | None:
    """A rank of its own for each process, in variables that begin like this."""
    rank_name, size_name, master_name = f"{prefix}RANK", f"{prefix}WORLD_SIZE", f"{prefix}MASTER_ADDR"
    if rank_name not in environment and size_name not in environment:
        return None
    rank, size = _rank_and_size(environment, rank_name, size_name)
    return Place(
        f"{rank_name} and {size_name}",
        (size, size),
        rank,
        local_rank=_number(environment, f"{prefix}LOCAL_RANK"),
        node=_number(environment, f"{prefix}GROUP_RANK"),
        local_size=_number(environment, f"{prefix}LOCAL_WORLD_SIZE"),
        master=environment.get(master_name, ""),
        run=_torchrun_id(environment) or _joined(environment, master_name, f"{prefix}MASTER_PORT"),
    )


def _torchrun_id(environment: Environment) -> str:
    """The name of torchrun's run; "none" is what it says where it was given none."""
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def _kubeflow(environment: Environment) -> Place | None:
    """What a pod is given to start torchrun with, read by a process that was started without it; or a rank under such names."""
    if "PET_NNODES" not in environment:
        return _ranked(environment, "PET_")
    nodes, each = _number(environment, "PET_NNODES") or 1, _number(environment, "PET_NPROC_PER_NODE") or 1
    node, local = _number(environment, "PET_NODE_RANK"), _number(environment, "LOCAL_RANK")
    local = 0 if local is None and each == 1 else local
    rank = None if node is None or local is None else node * each + local
    if rank is not None and rank >= nodes * each:
        raise ConfigError(f"PET_NODE_RANK={node} is not below PET_NNODES={nodes}")
    return Place(
        "PET_NNODES and PET_NPROC_PER_NODE",
        (nodes * each, nodes * each),
        rank,
        local_rank=local,
        node=node,
        local_size=each,
        master=environment.get("PET_MASTER_ADDR", ""),
        run=environment.get("PET_RDZV_ID") or _joined(environment, "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    )


def _slurm(environment: Environment) -> Place | None:
    """The batch script of a job has some of these variables too, and is alone; a step says its own number of tasks."""
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    batch_script = tasks == "SLURM_NTASKS" and environment.get("ENVIRONMENT") == "BATCH"
    if "SLURM_PROCID" not in environment or tasks not in environment or batch_script:
        return None
    rank, size = _rank_and_size(environment, "SLURM_PROCID", tasks)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return Place(
        f"SLURM_PROCID and {tasks}",
        (size, size),
        rank,
        local_rank=_number(environment, "SLURM_LOCALID"),
        node=_number(environment, "SLURM_NODEID"),
        local_size=size if environment.get("SLURM_STEP_NUM_NODES") == "1" else None,
        master=environment.get("MASTER_ADDR") or first_host(nodes),
        run=_joined(environment, "SLURM_JOB_ID", "SLURM_STEP_ID"),
    )


def _open_mpi(environment: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    rank, size = _rank_and_size(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return Place(
        "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
        (size, size),
        rank,
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        master=environment.get("MASTER_ADDR", ""),
        run=environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", ""),
    )


def _pmi(environment: Environment) -> Place | None:
    if "PMI_RANK" not in environment:
        return None
    rank, size = _rank_and_size(environment, "PMI_RANK", "PMI_SIZE")
    return Place(
        "PMI_RANK and PMI_SIZE",
        (size, size),
        rank,
        local_rank=_number(environment, "MPI_LOCALRANKID"),
        local_size=_number(environment, "MPI_LOCALNRANKS"),
        master=environment.get("MASTER_ADDR", ""),
        launched_with="PMI_RANK",
    )


_INDEX: Final = "JOB_COMPLETION_INDEX"
_LAUNCHERS: Final[tuple[Callable[[Environment], Place | None], ...]] = (_torchrun, _kubeflow, _slurm, _open_mpi, _pmi)


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
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no number", hint=f"correct {name}, or set FERRORPC_WORLD_SIZE and unset it")
    return int(text)


def _rank_and_size(environment: Environment, rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank is None or size is None:
        present, absent = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise ConfigError(f"{present} is set, but {absent} is not", hint=f"set {absent} as well, or unset {present}")
    if rank >= size:
        raise ConfigError(f"{rank_name}={rank} is not below {size_name}={size}", hint="ranks count from 0")
    return rank, size


def _joined(environment: Environment, *names: str) -> str:
    return ".".join(environment[name] for name in names if environment.get(name))
