"""`ferrorpc run`: the flags of the launcher. Flags that torchrun also has are accepted under its names as well."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ferrorpc.cli.launcher import launch as launcher
from ferrorpc.cli.launcher.environment import launcher_environment, worker_environment
from ferrorpc.cli.launcher.output import Console
from ferrorpc.cli.launcher.plan import (
    DEFAULT_MASTER_PORT,
    Plan,
    command_of,
    node_placement,
    node_range,
    process_count,
    world_range,
)
from ferrorpc.cli.launcher.worker_group import FailurePolicy
from ferrorpc.cli.parameters import Directory, Seconds
from ferrorpc.cli.ports import LOOPBACK, free_port
from ferrorpc.cli.system import require_linux
from ferrorpc.config import LAUNCH_VARIABLE, Config
from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import split_address


def _option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option whose long names can also be written with underscores, as torchrun allows."""
    both = (spelling for name in names for spelling in (name, re.sub(r"(?<=\w)-", "_", name)))
    return click.option(*dict.fromkeys(both), **attributes)


def _of_torchrun(command: Any) -> Any:
    """Adds flags of torchrun that have no effect here, so that its command lines work unchanged."""
    flags: tuple[tuple[tuple[str, ...], click.ParamType[Any], str], ...] = (
        (("--rdzv-backend",), click.Choice(["c10d", "static"]), "the coordinator replaces these"),
        (("--rdzv-conf",), click.STRING, "FERRORPC_TIMEOUT limits the rendezvous"),
        (("--monitor-interval",), click.FLOAT, "an exit is seen at once"),
        (("--start-method",), click.Choice(["spawn", "fork", "forkserver"]), "each worker is a new program"),
        (("-t", "--tee"), click.STRING, "output is always shown, and also kept with --log-dir"),
        (("-r", "--redirects"), click.STRING, "likewise; --ranks shows that of some workers only"),
        (("--logs-specs",), click.STRING, "likewise"),
        (("--duplicate-stdout-filters",), click.STRING, "search the files of --log-dir instead"),
        (("--duplicate-stderr-filters",), click.STRING, "likewise"),
        (("--event-log-handler",), click.STRING, "`ferrorpc status` shows the events of a job"),
        (("--signals-to-handle",), click.STRING, "stop signals, SIGUSR1 and SIGUSR2 are always forwarded"),
        (("--numa-binding",), click.STRING, "workers run on any CPU, unless the script binds itself"),
        (("--run-path",), click.BOOL, "SCRIPT is always run by its path"),
    )
    for names, kind, why in reversed(flags):
        text, alone = f"Of torchrun, no effect: {why}.", kind is click.BOOL
        command = _option(*names, type=kind, is_flag=alone, expose_value=False, help=text)(command)
    for name in _REFUSED:
        alone = name == "--virtual-local-rank"
        command = _option(name, is_flag=alone, expose_value=False, hidden=True, callback=_refuse)(command)
    return command


_REFUSED = {
    "--local-addr": "set FERRORPC_ADVERTISE to the address by which the others reach this node",
    "--virtual-local-rank": "let the script choose its device by LOCAL_RANK, or set CUDA_VISIBLE_DEVICES itself",
}
"""Flags of torchrun whose effect cannot be left out, and what to do instead."""


def _refuse(context: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        name = param.opts[0]
        raise ConfigError(f"there is no flag {name} here, as torchrun has it", hint=_REFUSED[name])


@click.command("run", context_settings={"allow_interspersed_args": False})
@_option("-n", "--nproc", "--nproc-per-node", "processes", default="1", show_default=True, help="Workers: N, cpu, gpu or auto.")
@_option("--nnodes", "nodes", default="1", show_default=True, help="Nodes: N, or MIN:MAX for an elastic world.")
@_option("--world-size", "world", help="MIN:MAX members, for a world that may lose some and go on.")
@_option("--node-rank", type=int, help="This node's number, from 0; torch.distributed needs it.")
@_option(
    "--coordinator",
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="Default FERRORPC_COORDINATOR; without one the launcher starts its own.",
)
@_option("--http-port", type=click.IntRange(0, 65535), help="Port of the status page of the launcher's own coordinator.")
@_option("--standalone", is_flag=True, help="Start its own coordinator even where FERRORPC_COORDINATOR is set.")
@_option("--job", "--rdzv-id", help="The job's name; jobs on one coordinator do not see each other.")
@_option("--master-addr", help="Where torch.distributed's rank 0 listens.")
@_option("--master-port", type=click.IntRange(0, 65535), help="Its port.")
@_option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often failed workers are started again.",
)
@_option(
    "--restart",
    "scope",
    type=click.Choice(["gang", "worker"]),
    default="gang",
    show_default=True,
    help="What a restart restarts: all workers of this node, or (for scripts that call reform()) the failed one.",
)
@_option(
    "--grace",
    "grace_seconds",
    type=Seconds(min=0),
    default=5.0,
    show_default=True,
    help="Seconds that the others have to end by themselves after a failure, before SIGTERM.",
)
@_option(
    "--shutdown-timeout",
    "shutdown_seconds",
    type=Seconds(min=0),
    default=30.0,
    show_default=True,
    help="Seconds between SIGTERM and SIGKILL.",
)
@_option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@_option("--no-python", is_flag=True, help="SCRIPT is a program.")
@_option("--log-dir", type=Directory(), help="Keep each worker's output there too.")
@_option("--ranks", "--local-ranks-filter", "shown", help="Show only these local ranks, such as 0,3.")
@_option("--role", default="default", show_default=True, help="Value of ROLE_NAME for the workers.")
@_of_torchrun
@_option("--dry-run", is_flag=True, help="Show each worker's command and variables without running it.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@click.pass_context
def command(
    context: click.Context,
    /,
    dry_run: bool,
    max_restarts: int,
    scope: str,
    grace_seconds: float,
    shutdown_seconds: float,
    **flags: Any,
) -> int:
    """Run SCRIPT in several processes that find each other.

    Everything after SCRIPT is passed to it. The exit code is that of the first rank that failed; 128 + n for signal n; 64 for
    bad configuration; 75 when the membership was lost and a retry can help.
    """
    joins = not flags["standalone"] and bool(flags["coordinator"] or flags["job"])
    environment = launcher_environment(os.environ, joins=joins)
    policy = FailurePolicy(max_restarts, scope, grace_seconds, shutdown_seconds)
    plan = make_plan(environment=environment, policy=policy, **flags)
    if not flags["no_python"] and context.get_parameter_source("processes") is ParameterSource.DEFAULT:
        options = [option for option in context.command.params if option.expose_value]  # the others have no effect
        _tell_of_misplaced(flags["target"], {spelling for option in options for spelling in option.opts})
    if dry_run:
        _show(plan, environment)
        return 0
    return launch(plan, environment)


def run_alone(target: tuple[str, ...], processes: int, **flags: Any) -> int:
    """Runs a job of ferrorpc's own, such as the demo, which is never a part of another. Returns the exit code.

    Args:
        flags: further ones of `make_plan`.
    """
    environment = launcher_environment(os.environ, joins=False)
    environment.pop("FERRORPC_WORLD_SIZE", None)  # the size of this job is that of its workers
    return launch(
        make_plan(target=target, environment=environment, processes=str(processes), standalone=True, **flags), environment
    )


def launch(plan: Plan, environment: Mapping[str, str]) -> int:
    """Runs a plan on this process's standard streams. Returns the exit code."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # in place of a stream that this process was started without
        out, err = sys.stdout or nowhere, sys.stderr or nowhere
        out.flush()
        err.flush()
        return launcher.launch(plan, Console(out.buffer, err.buffer, environment), environment)


def make_plan(
    *,
    target: tuple[str, ...],
    environment: Mapping[str, str] = os.environ,
    processes: str = "1",
    nodes: str = "1",
    world: str | None = None,
    node_rank: int | None = None,
    coordinator: str | None = None,
    http_port: int | None = None,
    standalone: bool = False,
    job: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    policy: FailurePolicy | None = None,
    module: bool = False,
    no_python: bool = False,
    log_dir: Path | None = None,
    shown: str | None = None,
    role: str = "default",
) -> Plan:
    """The plan that these flags ask for, in an environment whose settings stand for flags that are not given.

    Raises:
        ConfigError: flags contradict each other, or name something that does not exist.
    """
    require_linux("the launcher", "`ferrorpc coordinator`, and each process with FERRORPC_COORDINATOR and FERRORPC_WORLD_SIZE")
    config = Config({"coordinator": coordinator or None, "job": job}, environment)
    count, node_span = process_count(processes, target), node_range(nodes)
    command_line = command_of(target, module=module, no_python=no_python)
    rank, node, address, owns = node_placement(node_span, node_rank, config["coordinator"], standalone=standalone)
    if http_port is not None and not owns:
        raise ConfigError(f"--http-port with a coordinator at {address}", hint="give --http-port to `ferrorpc coordinator`")
    single = node_span == (1, 1)
    master = master_addr or (LOOPBACK if single else split_address(address)[0])
    own_port = split_address(address)[1]
    port = master_port or (_master_port(own_port) if single else DEFAULT_MASTER_PORT)
    chosen_ports = [own_port] * owns + [port] * (single and not master_port)
    page_port = config["http_port"] if http_port is None and owns else http_port
    if page_port == 0:  # the coordinator keeps its page's address when it is started again
        page_port = free_port(own_port, port)
        chosen_ports.append(page_port)
    return Plan(
        command=command_line,
        processes=count,
        nodes=node_span,
        world=world_range(world, node_span, count, config["world_size"]),
        node_rank=rank,
        node=node,
        coordinator=address,
        owns_coordinator=owns,
        http_port=page_port,
        job=config["job"],
        master=(master, port),
        chosen_ports=tuple(chosen_ports),
        policy=policy or FailurePolicy(),
        log_dir=log_dir,
        shown=None if shown is None else _local_ranks(shown, count),
        role=role,
    )


def _master_port(own_port: int) -> int:
    """A port for torch.distributed, for which alone a machine needs IPv4's loopback if its coordinator is known."""
    try:
        return free_port(own_port)
    except ConfigError as error:
        raise ConfigError(error.message, hint=f"{error.hint}; or give --master-port", retryable=error.retryable) from None


def _tell_of_misplaced(target: tuple[str, ...], options: set[str]) -> None:
    """Says that the first option of the script's that is also one of these may have been meant for the launcher."""
    for word in target[1:]:
        option = word.partition("=")[0].rstrip("0123456789")  # -n2 is one word
        if option in options:
            why = "options of `ferrorpc run` come before the script"
            click.echo(f"ferrorpc run: one worker is started, and {option} goes to {target[0]}: {why}", err=True)
            return


def _local_ranks(text: str, processes: int) -> frozenset[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) < processes for part in parts):
        raise ConfigError(
            f"--ranks {text}: expected local ranks from 0 to {processes - 1}", hint="--ranks 0, or several with commas"
        )
    return frozenset(map(int, parts))


def _show(plan: Plan, base: Mapping[str, str]) -> None:
    apart = "; this is a worker of another launcher, whose job it does not join" if base.get(LAUNCH_VARIABLE) else ""
    whose = f"started by the launcher{apart}" if plan.owns_coordinator else "given"
    click.echo(f"coordinator {plan.coordinator} ({whose})")
    click.echo(f"command {shlex.join(plan.command)}")
    for worker in range(plan.processes):
        environment = worker_environment(plan, worker, 0, base, Path("(temporary)"))
        click.echo(f"\nrank {plan.label(worker)}")
        for name, value in sorted(environment.items()):
            if os.environ.get(name) != value:
                click.echo(f"  {name}={value}")
