"""Backends by name: those of ferrorpc, and those that others register."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from ferrorpc.backends import gpu
from ferrorpc.backends.base import Backend
from ferrorpc.backends.grpc import GrpcBackend
from ferrorpc.backends.message import MessageBackend
from ferrorpc.backends.simulated import Networks, SimulatedBackend
from ferrorpc.collectives.call import Operation
from ferrorpc.coordination.base import Session
from ferrorpc.errors import BackendUnavailableError, ConfigError, NcclError
from ferrorpc.transports.grpc.server import WorkerServer

if TYPE_CHECKING:
    from ferrorpc.arrays.device import Device

_log = logging.getLogger("ferrorpc.backends")
TRANSPORTS: Final = ("auto", "grpc", "shared_memory")


@dataclass(frozen=True, slots=True)
class Place:
    """What a factory needs to make a rank's backend, in a job that the rank has joined."""

    session: Session
    server: WorkerServer | None = None
    """This process's server for its peers; None in a world of one, which opens no socket."""
    transport: str = "auto"
    timeout: float = 60.0
    """Default timeout of an operation, in seconds."""
    asked: tuple[tuple[Operation, str], ...] = ()
    """Algorithms for calls that name none."""
    device: int | None = None
    """Number of the GPU asked for."""
    local_rank: int | None = None
    """Number among the processes of its node, if known."""


Factory: TypeAlias = Callable[[Place], Backend]


def check(name: str, source: str) -> None:
    """Checks that a backend with this name exists, before a job is joined.

    Args:
        source: where the name came from, for the error.

    Raises:
        ConfigError: there is none.
    """
    if name not in names():
        raise ConfigError(
            f"backend={name!r} (from {source}) is not one of {', '.join(names())}",
            hint="leave it out and one is chosen; for one of your own call ferrorpc.backends.registry.register() first",
        )


def create(name: str, place: Place) -> Backend:
    """Makes the backend with this name; "auto" chooses.

    Raises:
        BackendUnavailableError: there is none, or it cannot work here; the hint says what can.
    """
    factory = _auto if name == "auto" else _factories.get(name)
    if factory is None:
        raise BackendUnavailableError(f"no backend is called {name!r}", f"use one of: {', '.join(names())}")
    gpu.select_device(place.device, place.local_rank)
    return factory(place)


def register(name: str, factory: Factory) -> None:
    """Makes a third party's backend available as `init_process_group(backend=name)`.

    Raises:
        ConfigError: the name is taken.
    """
    if name == "auto" or name in _factories:
        raise ConfigError(f"a backend called {name!r} exists already", hint="register yours under another name")
    _factories[name] = factory


def names() -> list[str]:
    """The names that `create` knows, "auto" first."""
    return ["auto", *_factories]


def _best(place: Place) -> str:
    """The name that "auto" resolves to: the same on all ranks, because all know the same labels."""
    if place.server is None:
        return "simulated"
    peers = place.session.membership.assignment.peers
    if gpu.nccl_usable(peers):
        return "hybrid"
    return "cuda_ipc" if gpu.shares_gpu(peers) else "grpc"


def _auto(place: Place) -> Backend:
    """Makes the chosen backend. Whether a GPU can be shared is known only after trying, with the same answer on all ranks. If
    not, gRPC is used."""
    best = _best(place)
    if best != "cuda_ipc":
        return _factories[best](place)
    lanes = _grpc(place)
    try:
        return gpu.make_cuda_ipc(lanes, gpu.device_for(place.device, place.local_rank))
    except (BackendUnavailableError, NcclError) as error:
        _log.warning("backend 'auto' is gRPC: %s", error.message)
        return lanes
    except BaseException:
        lanes.close()
        raise


class _WorldOfOne(SimulatedBackend):
    """The backend "grpc" in a world of one, which needs neither a server nor transports."""

    name = "grpc"


def _grpc(place: Place) -> MessageBackend:
    if place.transport not in TRANSPORTS:
        hint = f"use one of: {', '.join(TRANSPORTS)}"
        raise BackendUnavailableError(f"no transport is called {place.transport!r}", hint)
    if place.server is None:
        return _alone(_WorldOfOne, place)
    return GrpcBackend(place.session, place.server, path=place.transport, timeout=place.timeout, asked=place.asked)


def _alone(kind: type[SimulatedBackend], place: Place) -> SimulatedBackend:
    size = place.session.membership.assignment.size
    if size > 1:
        raise BackendUnavailableError(
            f"a simulated world lives in one process, and this job has {size}",
            "make one with SimulatedBackend.create_group(n) or ferrorpc.testing.run_world(n, fn)",
        )
    return kind(place.session, Networks(place.session.clock, None, 0), place.timeout)


def _on_gpus(over: Callable[[MessageBackend, Device], Backend]) -> Factory:
    def make(place: Place) -> Backend:
        device = gpu.device_for(place.device, place.local_rank)  # raises what is missing before lanes are made
        lanes = _grpc(place)
        try:
            return over(lanes, device)
        except BaseException:
            lanes.close()
            raise

    return make


_factories: Final[dict[str, Factory]] = {
    "grpc": _grpc,
    "simulated": partial(_alone, SimulatedBackend),
    "nccl": _on_gpus(gpu.make_nccl),
    "hybrid": _on_gpus(gpu.make_hybrid),
    "cuda_ipc": _on_gpus(gpu.make_cuda_ipc),
}
