"""init_process_group: joins the job that the environment describes and returns its group."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Final, Unpack

from ferrorpc.backends import registry
from ferrorpc.backends.base import Backend
from ferrorpc.backends.gpu import join_labels
from ferrorpc.bootstrap.address import advertised_host, host_may_change, require_authentication
from ferrorpc.bootstrap.coordinator import start_coordinator
from ferrorpc.bootstrap.environment import (
    NO_LAUNCHER,
    LaunchInfo,
    detect_launch,
    job_named_after,
    member_name,
    own_coordinator_address,
    run_label,
)
from ferrorpc.bootstrap.launcher_process import launcher_process_id
from ferrorpc.collectives.tuning import parse_algorithms
from ferrorpc.config import LAUNCH_VARIABLE, Config, SettingArguments, host_name, unknown_settings
from ferrorpc.coordination import process_exit
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.coordination.session import RemoteSession
from ferrorpc.errors import (
    ConfigError,
    CoordinatorUnavailableError,
    GroupAbortedError,
    PeerLostError,
    RendezvousTimeoutError,
    UsageError,
)
from ferrorpc.generation_errors import reason_of
from ferrorpc.group import ProcessGroup
from ferrorpc.logs import set_up_logging
from ferrorpc.telemetry import set_up_telemetry
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.wire.tls import TlsFiles
from ferrorpc.wire.token import Token

_log = logging.getLogger("ferrorpc.bootstrap")
_OWN: Final = (
    "rank 0 starts the coordinator there when it calls init_process_group(): see whether it runs and has come to that, and "
    "whether MASTER_ADDR and FERRORPC_PORT, which say where, are the same for all"
)
_NO_GROUP: Final = "no group was made: call ferrorpc.init_process_group() again, or let the launcher start the ranks again"
_TORCHS_BACKENDS: Final = ("gloo", "mpi", "ucc")
"""Backends of torch.distributed for arrays on the host."""
_SPAWNED: Final = (
    "no launcher has set this process's rank, so it is a world of one, although multiprocessing started it: for several "
    "ranks start the script with `ferrorpc run -n N` and call its main function directly; world_size=1 says that one is meant"
)
_SPAWNED_IN_A_RANK: Final = (
    "multiprocessing started this process within a rank of `ferrorpc run`, whose place it takes: call the main function "
    "directly, because `ferrorpc run -n N` starts N processes itself"
)
_open: list[LocalSession | RemoteSession] = []
"""The session of this process's group. The next `init_process_group` checks whether it was left."""


def init_process_group(
    backend: str = "auto", transport: str = "auto", timeout: float | None = None, **settings: Unpack[SettingArguments]
) -> ProcessGroup:
    """Joins this process's job and returns the group of all its ranks; a context manager.

    Its world and rank come from the environment: FERRORPC_* variables, else those of torchrun, Kubeflow, SLURM or MPI; without
    any it is a world of one. If no coordinator is named, rank 0 starts one.

    Args:
        backend: what performs operations: "auto", "grpc", "nccl" (arrays on GPUs, by NCCL), "hybrid" (arrays on GPUs by NCCL,
            others as with "grpc"), "cuda_ipc" (likewise, but GPUs read each other's memory, for ranks that share a GPU), or a
            name that was passed to `ferrorpc.backends.registry.register`. In programs that have imported CuPy, or begun to use
            a GPU through torch, "auto" is "hybrid" if every rank has a GPU of its own, and "cuda_ipc" if ranks of one host
            share one; otherwise it is "grpc".
        transport: how tensors travel: "auto" (shared memory between ranks of one host, else gRPC), "grpc", or
            "shared_memory", for which all ranks must be on one host.
            Of both, "auto" counts as not given, so a variable that is set applies.
        timeout: seconds for the rendezvous and for each operation; None for FERRORPC_TIMEOUT, else 60.
        settings: any other setting by its name (`ferrorpc config` lists them), over its variable: `job="trial"`.

    Raises:
        ConfigError: a setting or a variable is wrong; the message names it.
        UsageError: this process has an open group already; or, where there is a coordinator, was forked from one that had been
            a member, or is a helper that imports the main script (which needs `if __name__ == "__main__":`).
        CoordinatorUnavailableError: no coordinator answered at its address in time.
        RendezvousTimeoutError: naming the missing members.
        BackendUnavailableError: the backend cannot work here.
        PeerLostError, GroupAbortedError: a rank was lost, or failed, before the group was made.
    """
    process_exit.install_hooks()
    if _open and not _open[-1].left:
        raise UsageError(
            "this process has an open group already",
            hint="use the group that the first call returned, or close() it first; for several groups at once use "
            "group.subgroup(), or ProcessGroup(backend)",
        )
    for session in _open:
        session.leave()  # to the end, where that was interrupted
    chosen = {"backend": backend, "transport": transport}
    arguments = {name: value for name, value in chosen.items() if value != "auto"} | {"timeout": timeout}
    config = Config({**settings, **arguments})
    set_up_logging(config)
    set_up_telemetry(config)
    for name, meant in unknown_settings(os.environ):
        if meant:
            _log.warning("%s is set, but no setting is called so: %s is", name, meant)
    _check_backend(config)
    asked = parse_algorithms(config["algorithm"] or (), config.source("algorithm"))
    launch = detect_launch(os.environ, config)
    _log.info("%s", launch)
    _warn_if_spawned(launch)
    session, server = _session(config, launch)
    _open[:] = [session]
    made = None
    try:
        if isinstance(session, RemoteSession):
            _join(session, config, launch)
        place = registry.Place(
            session, server, config["transport"], config["timeout"], asked, config["device"], launch.local_rank
        )
        made = registry.create(config["backend"], place)
        return ProcessGroup(made, config["timeout"])
    except BaseException as error:
        session.leave(reason_of(error))
        if isinstance(made, Backend):  # whatever a third party's factory has returned
            made.close()
        if isinstance(error, PeerLostError | GroupAbortedError):
            raise error.again(_NO_GROUP) from None
        raise


def _warn_if_spawned(launch: LaunchInfo) -> None:
    processes = sys.modules.get("multiprocessing.process")  # not loaded where nothing was started by it
    if processes is not None and processes.parent_process() is not None:
        if launch.source == NO_LAUNCHER:
            _log.warning(_SPAWNED)
        elif LAUNCH_VARIABLE in os.environ:
            _log.warning(_SPAWNED_IN_A_RANK)


def _check_backend(config: Config) -> None:
    try:
        registry.check(config["backend"], config.source("backend"))
    except ConfigError as error:
        if any(name in config["backend"] for name in _TORCHS_BACKENDS):
            raise error.again('leave it out, or pass "grpc": arrays on the host travel through memory or over gRPC') from None
        raise


def _session(config: Config, launch: LaunchInfo) -> tuple[LocalSession, None] | tuple[RemoteSession, WorkerServer]:
    """A session that has yet to join the job, and the worker server, whose address the other members get; for a world of one a
    session without socket or thread."""
    if launch.world == (1, 1) and config["coordinator"] is None:
        return LocalWorld(1, job=config["job"], timeout=config["timeout"]).session(0), None
    process_exit.refuse_in_child()
    address, job = config["coordinator"], config["job"]
    starts_own = address is None
    if starts_own:
        address, job = own_coordinator_address(launch, config["port"]), _job_of_run(config, launch)
    if address.endswith(":0"):
        hint = "name the coordinator's port in FERRORPC_COORDINATOR, or, for one that rank 0 starts, in FERRORPC_PORT"
        raise ConfigError(f"nobody can reach a coordinator at {address}: 0 asks for any free port", hint=hint)
    if starts_own and launch.pinned_rank == 0:
        start_coordinator(address, config, os.environ)
    host = host_name()
    advertised = advertised_host(address, config)
    tls = TlsFiles.of(config)
    require_authentication(config, tls)
    token = Token(config["token_file"])
    mutual = tls if tls is not None and tls.mutual else None
    server = WorkerServer(config["bind"], advertised, token, tls=mutual, lanes=config["lanes"], lease_seconds=config["lease"])
    try:
        session = RemoteSession(
            address,
            job=job,
            name=member_name(os.environ, config, launch, host, os.getpid()),
            policy=launch.world,
            pinned_rank=launch.pinned_rank,
            hinted_rank=launch.hinted_rank,
            worker_address=partial(_address_now, server, address, config),
            host=host,
            launch=os.environ.get(LAUNCH_VARIABLE, ""),
            labels=join_labels(config["backend"], config["device"], launch.local_rank) | run_label(os.environ, launch),
            config=config,
        )
        session.on_leave(server.close)
    except BaseException:
        server.close()
        raise
    return session, server


def _join(session: RemoteSession, config: Config, launch: LaunchInfo) -> None:
    """Joins the job. Where no coordinator was named, an error says who starts one."""
    try:
        session.join()
    except (CoordinatorUnavailableError, RendezvousTimeoutError) as error:
        if config["coordinator"] is not None:
            raise
        alone = f"{error.hint}; or, if this process is to run alone, unset {launch.source}"
        raise error.again(_OWN if isinstance(error, CoordinatorUnavailableError) else alone) from None


def _address_now(server: WorkerServer, coordinator: str, config: Config) -> str:
    """Where peers dial the server. Asked at each connection to the coordinator, because a new network ends the last one.

    Raises:
        CoordinatorUnavailableError: no route leads to the coordinator, or one from an address of no use to peers. There may be
            no better one for a moment while a network comes back.
    """
    if host_may_change(config):
        try:
            server.advertise(advertised_host(coordinator, {**config, "timeout": 0.0}))
        except ConfigError as error:
            raise CoordinatorUnavailableError(error.message, hint=error.hint) from None
    return server.address


def _job_of_run(config: Config, launch: LaunchInfo) -> str:
    """The job's name if rank 0 starts the coordinator: two runs that use one port by mistake must not mix."""
    given = str(config["job"])
    if config.source("job") != "default":
        return given
    run_id = launcher_process_id(launch.launcher_variable) if launch.launcher_variable and launch.one_node else launch.run_id
    return job_named_after(run_id) if run_id else given
