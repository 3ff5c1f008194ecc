"""Every backend passes one suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import BackendContract, BasicBackendContract, FaultPlan, run_groups, run_world
from ferrorpc.testing.contract_groups import AsyncContract
from ferrorpc.transports.routed import RoutedTransport
from tests.contract.queues import MeetingBackend, queue_backends
from tests.contract.wrapped import wrapped_backends
from tests.integration.test_grpc_backend import GrpcWorld


class TestSimulated(BackendContract):
    """One process, virtual time, messages that take random times."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return run_world(size, fn, faults=FaultPlan(delay_seconds=(0.0, 0.002)), seed=size)


class TestSimulatedInRealTime(BackendContract):
    """One process, real threads."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return run_world(size, fn, clock=SYSTEM_CLOCK)


class TestGrpc(BackendContract):
    """Real streams between servers, one for each rank."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with GrpcWorld(size) as world:
            return run_groups([ProcessGroup(backend) for backend in world.backends], fn)


class TestSharedMemory(BackendContract):
    """Ranks that map each other's memory."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with GrpcWorld(size, transport="shared_memory") as world:
            return run_groups([ProcessGroup(backend) for backend in world.backends], fn)


class TestSharedMemoryMessages(BackendContract):
    """The same ranks where everything has to be a message."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with GrpcWorld(size, transport="shared_memory") as world:
            for backend in world.backends:
                backend.control = backend.arena = None
                assert (backend.arena, type(backend.transport) is RoutedTransport) == (None, size > 1)
            return run_groups([ProcessGroup(backend) for backend in world.backends], fn)


class TestTwoHosts(BackendContract):
    """One half of the ranks shares memory, the other half is elsewhere."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        transports = ["auto" if rank < size - size // 2 else "grpc" for rank in range(size)]
        with GrpcWorld(size, transport=transports) as world:
            return run_groups([ProcessGroup(backend) for backend in world.backends], fn)


class TestThirdParty(BasicBackendContract, AsyncContract):
    """A backend of somebody else's that has send, recv and barrier, and nothing more."""

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return run_groups([ProcessGroup(backend, timeout=20.0) for backend in queue_backends(size)], fn)


class TestThirdPartyWhoseSendsWait(BasicBackendContract, AsyncContract):
    """One whose send waits until the peer receives: its collectives must not send to one peer after the other."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return run_groups([ProcessGroup(each, timeout=20.0) for each in queue_backends(size, MeetingBackend)], fn)


class TestWrapped(BasicBackendContract):
    """A backend of somebody else's that hands on to one of ours what it is asked for."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        return run_groups([ProcessGroup(backend, timeout=20.0) for backend in wrapped_backends(size)], fn)
