"""init_process_group: from the environment to an open group."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any, Final

from ferrorpc.backends import registry
from ferrorpc.backends.gpu import join_labels
from ferrorpc.bootstrap.address import advertised_host, require_private
from ferrorpc.bootstrap.ancestry import launcher_of
from ferrorpc.bootstrap.coordinator import start_coordinator
from ferrorpc.bootstrap.environment import Place, detect, member_name, own_coordinator
from ferrorpc.collectives.tuning import parse_algorithms
from ferrorpc.config import LAUNCH, Config, strangers
from ferrorpc.coordination import farewell
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.coordination.session import RemoteSession
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError, GroupAbortedError, PeerLostError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
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
"""Those of torch.distributed for arrays on the host."""
_open: list[LocalSession | RemoteSession] = []
"""The seat of this process's group; the next `init_process_group` looks whether it was left."""


def init_process_group(
    backend: str = "auto", transport: str = "auto", timeout: float | None = None, **settings: Any
) -> ProcessGroup:
    """Joins this process's job and returns the group of all its ranks; a context manager.

    Who and where this process is comes from its environment: FERRORPC_* variables, else those of torchrun, Kubeflow, SLURM or
    MPI; without any it is a world of one. Where no coordinator is named, rank 0 starts one.

    Args:
        backend: who performs operations: "auto", "grpc", "nccl" (arrays on GPUs, by NCCL), "hybrid" (those by NCCL, the
            others as with "grpc"), "cuda_ipc" (likewise, by reading each other's GPU memory, for ranks that share a GPU), or a
            name that `ferrorpc.backends.registry.register` was given. In programs that have imported CuPy, or begun to use a
            GPU through torch, "auto" is "hybrid" where every rank has a GPU of its own, and "cuda_ipc" where ranks of one host
            share one; else it is "grpc".
        transport: how tensors travel: "auto" (through memory between ranks of one host, else over gRPC), "grpc", or
            "shared_memory" where all ranks must be on one host.
        timeout: seconds for the rendezvous and for each operation; None for FERRORPC_TIMEOUT, else 60.
        settings: any other setting by its name (`ferrorpc config` lists them), before its variable: `job="trial"`.

    Raises:
        ConfigError: a setting or a variable is wrong, and named.
        UsageError: this process has an open group already, or was forked from one that had been a member.
        CoordinatorUnavailableError: nobody answered at the coordinator's address in time.
        RendezvousTimeoutError: naming who did not come.
        BackendUnavailableError: the backend cannot work here.
        PeerLostError, GroupAbortedError: a rank was lost, or gave up, before the group was made.
    """
    farewell.install()
    if _open and not _open[-1].left:
        raise UsageError(
            "this process has an open group already",
            hint="use the group that the first call returned, or close() it first; for several groups at once use "
            "group.subgroup(), or ProcessGroup(backend)",
        )
    chosen = {"backend": backend, "transport": transport}
    arguments = settings | {name: value for name, value in chosen.items() if value != "auto"} | {"timeout": timeout}
    config = Config(arguments)
    set_up_logging(config)
    set_up_telemetry(config)
    for name, meant in strangers(os.environ):
        if meant:
            _log.warning("%s is set, but no setting is called so: %s is", name, meant)
    _check_backend(config)
    asked = parse_algorithms(config["algorithm"] or ())
    place = detect(os.environ, config)
    _log.info("place in the job taken from %s: %s", place.source, place)
    session, server = _local_seat(config) if _alone(config, place) else _remote_seat(config, place)
    _open[:] = [session]
    try:
        made_for = registry.Place(
            session, server, config["transport"], config["timeout"], asked, config["device"], place.local_rank
        )
        return ProcessGroup(registry.create(config["backend"], made_for), config["timeout"])
    except BaseException as error:
        session.leave(farewell.reason_of(error))
        if isinstance(error, PeerLostError | GroupAbortedError):
            raise error.again(_NO_GROUP) from None
        raise


def _check_backend(config: Config) -> None:
    try:
        registry.check(config["backend"], config.source("backend"))
    except ConfigError as error:
        if any(name in config["backend"] for name in _TORCHS_BACKENDS):
            raise error.again('leave it out, or pass "grpc": arrays on the host travel through memory or over gRPC') from None
        raise


def _alone(config: Config, place: Place) -> bool:
    return place.world == (1, 1) and config["coordinator"] is None


def _local_seat(config: Config) -> tuple[LocalSession, None]:
    """The only seat of a world of one: no socket, no thread."""
    return LocalWorld(1, job=config["job"], timeout=config["timeout"]).session(0), None


def _remote_seat(config: Config, place: Place) -> tuple[RemoteSession, WorkerServer]:
    """A seat at the coordinator, and the server whose address the others get with it."""
    farewell.refuse_in_child()
    address, job = config["coordinator"], config["job"]
    if address is None:
        address = own_coordinator(place, config["port"])
        job = _job_of_run(config, place)
        if place.pinned_rank == 0:
            start_coordinator(address, config, os.environ)
    host = socket.gethostname()
    advertised = advertised_host(address, config)
    tls = TlsFiles.of(config)
    require_private(config, tls)
    token = Token(config["token_file"])
    mutual = tls if tls is not None and tls.mutual else None
    server = WorkerServer(config["bind"], advertised, SYSTEM_CLOCK, token, tls=mutual, lanes=config["lanes"])
    try:
        session = RemoteSession(
            address,
            job=job,
            name=member_name(os.environ, config, place, host, os.getpid()),
            policy=place.world,
            pinned_rank=place.pinned_rank,
            hinted_rank=place.hinted_rank,
            worker_address=server.address,
            host=host,
            launch=os.environ.get(LAUNCH, ""),
            labels=join_labels(config["backend"], config["device"], place.local_rank),
            config=config,
        ).join()
    except BaseException as error:
        server.close()
        if isinstance(error, CoordinatorUnavailableError) and config["coordinator"] is None:
            raise error.again(_OWN) from None
        raise
    session.at_leave(server.close)
    return session, server


def _job_of_run(config: Config, place: Place) -> str:
    """The job of a coordinator that nobody named: two runs that meet at one port by mistake must not mix."""
    given = str(config["job"])
    if config.source("job") != "default":
        return given
    run = launcher_of(place.launched_with) if place.launched_with and place.one_node else place.run
    return f"run-{run}" if run else given
