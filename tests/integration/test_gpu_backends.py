"""NCCL backends with a real coordinator and real lanes, over fake GPUs, and host arrays that share memory beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import device_of
from ferrorpc.backends import gpu, registry
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.grpc import GrpcBackend
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.backends.registry import Place
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import PeerLostError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn, stand_in
from ferrorpc.transports.grpc.server import WorkerServer
from tests.fake_gpu.operations import every_operation
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join
from tests.threads import results_of, together
from tests.waiting import eventually

SECONDS = 20.0
RANKS = 2


@pytest.fixture(scope="module")
def service() -> Iterator[CoordinatorProcess]:
    found = CoordinatorProcess()
    yield found
    found.stop()


@pytest.fixture
def cupy() -> Iterator[StandIn]:
    with stand_in(Machine(RANKS)) as module:
        yield module


class Job:
    """Members with servers of their own, who say their GPU when they join."""

    def __init__(self, service: CoordinatorProcess, cupy: StandIn, name: str) -> None:
        self.nccl = FakeNccl(cupy.machine)
        self.servers = [WorkerServer("127.0.0.1", "127.0.0.1") for _ in range(RANKS)]
        labels = [{"gpu": device_of(cupy, rank).uuid, "nccl": "22809"} for rank in range(RANKS)]
        self.sessions = together(
            [
                lambda rank=rank: join(
                    service.address,
                    rank,
                    RANKS,
                    job=name,
                    worker_address=lambda: self.servers[rank].address,
                    labels=labels[rank],
                )
                for rank in range(RANKS)
            ]
        )

    def backends(self, backend: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        places = [
            Place(session, server, transport, SECONDS, device=rank)
            for rank, (session, server) in enumerate(zip(self.sessions, self.servers, strict=True))
        ]

        def make(kind: type[DeviceBackend], lanes: Any, device: Device) -> NcclBackend:
            return kind(lanes, device, self.nccl.api(lanes.rank))

        monkeypatch.setattr(gpu, "_over_nccl", make)
        return results_of(together([partial(registry.create, backend, place) for place in places]))

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("backend", ["nccl", "auto", "grpc"])
def test_gpu_arrays_and_host_arrays_in_one_program(
    service: CoordinatorProcess, cupy: StandIn, monkeypatch: pytest.MonkeyPatch, backend: str, transport: str
) -> None:
    job = Job(service, cupy, f"mixed-{backend}-{transport}")
    backends = job.backends(backend, transport, monkeypatch)
    assert {type(each) for each in backends} == {{"nccl": NcclBackend, "auto": HybridBackend, "grpc": GrpcBackend}[backend]}

    def body(group: ProcessGroup) -> None:
        for turn in range(3):
            total = group.all_reduce(np.arange(5.0) + group.rank + turn)
            np.testing.assert_array_equal(total, 2 * np.arange(5.0) + 1 + 2 * turn)
            every_operation(group, cupy)
        even = group.subgroup([1, 0])
        assert even is not None
        with cupy.cuda.Device(group.rank):
            found = even.all_reduce(cupy.asarray(np.ones(3)))
            np.testing.assert_array_equal(cupy.asnumpy(found), np.full(3, 2.0))
        np.testing.assert_array_equal(even.all_reduce(np.ones(3)), np.full(3, 2.0))

    run_groups([ProcessGroup(each, timeout=SECONDS) for each in backends], body)
    assert job.nccl.minted == (backend != "grpc")
    job.close()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_arrays_of_many_chunks_have_the_bits_of_host_arrays(
    service: CoordinatorProcess, cupy: StandIn, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """More than goes before it is asked for, and more than pinned memory holds."""
    job = Job(service, cupy, f"large-{transport}")

    def body(group: ProcessGroup) -> None:
        x = np.random.default_rng(group.rank).standard_normal(6 * (1 << 20) + 3).astype(np.float32)
        with cupy.cuda.Device(group.rank):
            there = cupy.asarray(x)
            for wire in (None, "int8"):
                found = group.all_reduce(there, wire=wire, async_op=True).wait(host=True)
                assert cupy.asnumpy(found).tobytes() == group.all_reduce(x, wire=wire).tobytes()
            for one, other in zip(group.all_gather(there), group.all_gather(x), strict=True):
                assert cupy.asnumpy(one).tobytes() == other.tobytes()

    run_groups([ProcessGroup(each, timeout=SECONDS) for each in job.backends("grpc", transport, monkeypatch)], body)
    job.close()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("backend", ["grpc", "nccl", "auto"])
def test_gradients_become_means_on_their_gpus(
    service: CoordinatorProcess, cupy: StandIn, monkeypatch: pytest.MonkeyPatch, backend: str, transport: str
) -> None:
    job = Job(service, cupy, f"gradients-{backend}-{transport}")
    names = [f"p{number}" for number in range(6)]

    def gradient(rank: int, step: int, name: str) -> np.ndarray[Any, Any]:
        return np.random.default_rng([rank, step, int(name[1:])]).standard_normal(300).astype(np.float32)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            like = {name: cupy.asarray(np.zeros(300, np.float32)) for name in names}
            sync = GradientSynchronizer(like, group, bucket_cap_mb=0.003)
            for turn in range(4):
                with sync.step(weight=1.0 + group.rank) as step:
                    for name in sorted(names, key=lambda name: (int(name[1:]) * (2 * group.rank + 3) + turn) % 7):
                        step.ready(name, cupy.asarray(gradient(group.rank, turn, name)))
                for name in names:
                    parts = [gradient(rank, turn, name) * np.float32(1 + rank) for rank in range(RANKS)]
                    expected = (parts[0] + parts[1]) / np.float32(3)
                    np.testing.assert_array_equal(cupy.asnumpy(step.grads[name]), expected)

    run_groups([ProcessGroup(each, timeout=SECONDS) for each in job.backends(backend, transport, monkeypatch)], body)
    job.close()


def test_a_member_that_dies_in_a_step_gives_the_others_its_error_and_no_means(
    service: CoordinatorProcess, cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, both = Job(service, cupy, "death-in-a-step"), threading.Barrier(2)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            sync = GradientSynchronizer({"a": cupy.asarray(np.zeros(4))}, group)
            both.wait(SECONDS)
            if group.rank == 1:
                group.session.leave("ValueError: bad batch")
                return
            with pytest.raises(PeerLostError, match="bad batch"):
                sync({"a": cupy.asarray(np.ones(4))})

    run_groups([ProcessGroup(each, timeout=SECONDS) for each in job.backends("hybrid", "grpc", monkeypatch)], body)
    job.close()


def test_a_member_that_dies_frees_the_others_gpus(
    service: CoordinatorProcess, cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service, cupy, "death")
    groups = [ProcessGroup(each, timeout=SECONDS) for each in job.backends("hybrid", "grpc", monkeypatch)]

    def body(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            if group.rank == 1:
                return group.session.leave("ValueError: bad batch")
            with pytest.raises(PeerLostError, match="bad batch"):  # of the call itself, if the other rank was faster
                group.all_reduce(cupy.asarray(np.ones(4)), async_op=True).wait(host=True)
            return None

    run_groups(groups, body)
    (meeting,) = job.nccl.meetings.values()
    eventually(lambda: meeting.ends[0].aborted, "the end of the communicator")
    job.close()
