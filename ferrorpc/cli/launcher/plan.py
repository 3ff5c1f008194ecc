"""The plan of one `ferrorpc run`: its flags, checked and completed, as one value."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ferrorpc.cli.launcher.worker_group import FailurePolicy
from ferrorpc.cli.ports import LOOPBACK, free_port
from ferrorpc.cli.system import available_cpus
from ferrorpc.config import host_name, world_size
from ferrorpc.errors import ConfigError

DEFAULT_MASTER_PORT: Final = 29500
"""torch.distributed's default, for jobs of several nodes, which must agree on a port without communicating."""
WORKERS_MAX: Final = 1 << 22
"""Linux has no more process ids."""
OPEN_FILES: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths that mean something else in each process."""
SHELLS: Final = frozenset((b"sh", b"bash", b"dash", b"ksh", b"zsh"))


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch on this node.

    Attributes:
        command: what every worker executes.
        processes: workers on this node.
        nodes: (min, max) nodes.
        world: (min, max) members; equal for a fixed world.
        node_rank: this node's number, which in a fixed world determines its workers' ranks; None: the coordinator gives out
            all ranks.
        node: this node's name, the first half of its members' names.
        coordinator: host:port.
        owns_coordinator: whether this launcher starts it.
        http_port: of its status page; None without one.
        master: address and port of torch.distributed's own store.
        chosen_ports: those of these three that nobody asked for by number: the launcher keeps them from others while it runs.
        log_dir: where each worker's output is also written; None for the console alone.
        shown: workers whose output the console shows; None for all.
        role: value of ROLE_NAME.
    """

    command: tuple[str, ...]
    processes: int
    nodes: tuple[int, int]
    world: tuple[int, int]
    node_rank: int | None
    node: str
    coordinator: str
    owns_coordinator: bool
    job: str
    master: tuple[str, int]
    policy: FailurePolicy
    chosen_ports: tuple[int, ...] = ()
    http_port: int | None = None
    log_dir: Path | None = None
    shown: frozenset[int] | None = None
    role: str = "default"

    @property
    def elastic(self) -> bool:
        """Whether the world may grow and shrink; the coordinator then gives out the ranks."""
        return self.world[0] != self.world[1]

    def rank(self, worker: int) -> int | None:
        """World rank of a worker of this node, if known before the rendezvous."""
        if self.elastic or self.node_rank is None:
            return None
        return self.node_rank * self.processes + worker

    def name(self, worker: int) -> str:
        """A worker's name as a member of the job."""
        return f"{self.node}-{worker}"

    def label(self, worker: int) -> str:
        """The prefix of a worker's lines on the console."""
        rank = self.rank(worker)
        if rank is None:
            return self.name(worker)
        return str(rank) if self.nodes == (1, 1) else f"{self.node}:{rank}"


def command_of(target: Sequence[str], *, module: bool, no_python: bool) -> tuple[str, ...]:
    """The command line of a worker, from the arguments after the options.

    Raises:
        ConfigError: there is nothing to run, or the script does not exist.
    """
    if module and no_python:
        raise ConfigError("--module and --no-python exclude each other", hint="leave one of them out")
    if not target or not target[0]:
        raise ConfigError("there is no script to run", hint="ferrorpc run -n 4 train.py [arguments of train.py]")
    if no_python:
        if shutil.which(target[0]) is None:
            raise ConfigError(f"there is no program {target[0]!r}", hint=_hint_for_program(target[0]))
        return tuple(target)
    if module:
        return (sys.executable, "-m", *target)
    if target[0] == "-" or target[0].startswith(OPEN_FILES):
        raise ConfigError(
            f"ranks cannot read {target[0]!r}, which is open in the launcher alone", hint="save the script to a file"
        )
    if not Path(target[0]).exists():
        raise ConfigError(f"there is no file {target[0]!r}", hint=_hint_for(target))
    if _is_program(Path(target[0])):
        raise ConfigError(f"{target[0]!r} is a program, not a Python script", hint=_hint_for(target))
    script = f"./{target[0]}" if target[0].startswith("-") else target[0]  # else Python takes it for an option
    return (sys.executable, script, *target[1:])


def _is_program(path: Path) -> bool:
    """Whether a file is certainly not Python: machine code of Linux, or a script for a shell."""
    if not (path.is_file() and os.access(path, os.R_OK)):  # a pipe can be read only once
        return False
    with path.open("rb") as file:
        first_line = file.readline(256)
    names = {word.rpartition(b"/")[2] for word in first_line[2:].split()}
    return first_line.startswith(b"\x7fELF") or (first_line.startswith(b"#!") and not names.isdisjoint(SHELLS))


def _hint_for_program(name: str) -> str:
    if not Path(name).is_file():
        return "check its spelling and PATH"
    if os.access(name, os.X_OK):
        return f"say ./{name}: the file of this name is in no directory of the PATH"
    return f"chmod +x {name}: the file of this name is not executable; or leave --no-python out, if it is a Python script"


def _hint_for(target: Sequence[str]) -> str:
    """What to try where the script is not a file, or a program. Users of mpirun and srun may have named the interpreter too."""
    program = target[0]
    if shutil.which(program) is None and not Path(program).is_file():
        return f"check the path; this is {_here()}"
    if Path(program).name.startswith("python") and len(target) > 1:
        return f"leave {program!r} out: ranks run {target[1]} with {sys.executable}; or say --no-python before it"
    return f"say --no-python before it, if the program {program!r} is meant"


def process_count(text: str, following: Sequence[str] = ()) -> int:
    """Workers on this node: a number, "cpu" (one per CPU), "gpu" (one per device) or "auto" (gpu if there are any, else cpu).

    Args:
        following: the arguments after the options; mpirun's `-np 4` arrives as `-n p` followed by 4.

    Raises:
        ConfigError: anything else, or "gpu" without a device.
    """
    if text[:1] == "p" and (count := text[1:] or next(iter(following), "")).isdecimal():
        script = shlex.join(following if text[1:] else following[1:]) or "train.py"
        raise ConfigError(f"-np {count} is mpirun's; there is no flag -np here", hint=f"ferrorpc run -n {count} {script}")
    devices = _visible_devices()
    if text == "gpu" and not devices:
        raise ConfigError("-n gpu: this machine shows no CUDA device", hint="give a number, or check CUDA_VISIBLE_DEVICES")
    if text in ("auto", "gpu") and devices:
        return devices
    if text in ("auto", "cpu"):
        return available_cpus()
    workers = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= workers <= WORKERS_MAX:
        allowed = f"a number from 1 to {WORKERS_MAX}, auto, cpu or gpu"
        raise ConfigError(f"-n {text}: expected {allowed}", hint="ferrorpc run -n 4 train.py")
    return workers


def node_range(text: str) -> tuple[int, int]:
    """--nnodes: "N" or "MIN:MAX"."""
    try:
        return world_size(text)
    except ValueError as error:
        raise ConfigError(f"--nnodes {text}: {error}", hint="--nnodes 2, or --nnodes 1:4 for an elastic world") from None


def world_range(
    text: str | None, nodes: tuple[int, int], processes: int, variable: tuple[int, int] | None = None
) -> tuple[int, int]:
    """--world-size: "MIN:MAX" for a world that may lose members; without it all workers of all nodes.

    Args:
        variable: FERRORPC_WORLD_SIZE, used instead of the flag. A single number is ignored for several nodes: the other flags
            already determine it.

    Raises:
        ConfigError: MAX is not the number of workers of all nodes, or these are more than any world has.
    """
    together = nodes[1] * processes
    try:
        world_size(str(together))
    except ValueError as error:
        count = f"{nodes[1]} nodes with {processes} worker{'s' * (processes != 1)} each"
        raise ConfigError(f"{count} are a world of {together}: {error}", hint="check --nnodes and -n") from None
    if text is not None:
        what = f"--world-size {text}"
        try:
            low, high = world_size(text)
        except ValueError as error:
            raise ConfigError(f"{what}: {error}", hint="--world-size 2:4 lets 4 workers shrink to 2") from None
    elif variable is not None and (variable[0] != variable[1] or nodes == (1, 1)):
        low, high = variable
        what = f"FERRORPC_WORLD_SIZE={low}" + (f":{high}" if low != high else "")
    else:
        return nodes[0] * processes, together
    if high != together:
        count = f"{together} worker{'s' * (together != 1)} in all"
        raise ConfigError(f"{what} with {count}", hint=f"end it with {together}, or leave it out")
    return low, high


def node_placement(
    nodes: tuple[int, int], node_rank: int | None, coordinator: str | None, *, standalone: bool
) -> tuple[int | None, str, str, bool]:
    """This node's rank and name, the coordinator's address, and whether this launcher starts the coordinator.

    Port 0 names no coordinator that can be reached. As in torchrun's `--rdzv-endpoint localhost:0`, it asks for one of this
    launcher's own, on any free port.

    Raises:
        ConfigError: several nodes without a common coordinator, or an invalid node rank.
    """
    single = nodes == (1, 1)
    known = coordinator if coordinator and not standalone and not coordinator.endswith(":0") else None
    if known is None and not single:
        raise ConfigError(
            "several nodes need one coordinator that all of them reach",
            hint="start `ferrorpc coordinator --listen HOST:29700` on one of them and pass --coordinator HOST:29700 on each",
        )
    if node_rank is not None and not 0 <= node_rank < nodes[1]:
        hint = "leave it out, or say with --nnodes how many there are" if single else f"use 0 to {nodes[1] - 1}"
        raise ConfigError(f"--node-rank {node_rank} with --nnodes {nodes[1]}", hint=hint)
    rank = 0 if single else node_rank
    name = host_name() if node_rank is None else f"node{node_rank}"
    return (rank, name, f"{LOOPBACK}:{free_port()}", True) if known is None else (rank, name, known, False)


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a directory that is there no longer"


def _visible_devices() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))
