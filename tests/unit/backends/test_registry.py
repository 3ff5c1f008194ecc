"""Backends are found by name, and what is not there says why and what is."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import ferrorpc
from ferrorpc.backends import registry
from ferrorpc.backends.base import Backend
from ferrorpc.backends.registry import TRANSPORTS, Place, create, names, register
from ferrorpc.backends.simulated import Networks, SimulatedBackend
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import BackendUnavailableError, ConfigError, PeerLostError
from ferrorpc.group import ProcessGroup


def place(size: int = 1, transport: str = "auto") -> Place:
    return Place(LocalWorld(size).session(0), None, transport)


def test_a_world_of_one_needs_no_server() -> None:
    backend = create("auto", place())
    assert (backend.name, backend.rank, backend.size) == ("simulated", 0, 1)
    backend.barrier()
    backend.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_script_that_asks_for_grpc_runs_alone_too(transport: str) -> None:
    with ProcessGroup(create("grpc", place(transport=transport))) as group:
        assert (group.backend, group.rank, group.size) == ("grpc", 0, 1)
        assert (group.all_reduce(np.arange(3)) == np.arange(3)).all()
        with group.reform(1.0) as next_one:
            assert next_one.backend == "grpc"
            next_one.barrier()


@pytest.mark.parametrize(
    ("name", "where", "reason", "hint"),
    [
        ("nccl", place(), "GPU arrays need CuPy, which cannot be imported", "pip install 'ferrorpc[gpu]'"),
        ("hybrid", place(), "GPU arrays need CuPy, which cannot be imported", "'ferrorpc[gpu-cuda13]'"),
        ("gloo", place(), "no backend is called 'gloo'", "auto, grpc, simulated, nccl, hybrid"),
        ("simulated", place(2), "this job has 2", "run_world"),
        ("auto", place(2), "this job has 2", "run_world"),
        ("grpc", place(2), "this job has 2", "run_world"),
        ("grpc", place(transport="pigeon"), "no transport is called 'pigeon'", "auto, grpc, shared_memory"),
    ],
)
def test_what_cannot_work_says_why_and_what_can(
    monkeypatch: pytest.MonkeyPatch, name: str, where: Place, reason: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError) as raised:
        create(name, where)
    assert reason in raised.value.reason
    assert hint in raised.value.hint


def test_a_third_party_registers_its_own_backend_under_a_free_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    made = SimpleNamespace()
    given = place()
    register("carrier", lambda where: made if where is given else None)  # type: ignore[arg-type,return-value]
    assert create("carrier", given) is made
    assert names()[-1] == "carrier"
    for taken in ("carrier", "grpc", "auto"):
        with pytest.raises(ConfigError, match=taken):
            register(taken, lambda where: made)  # type: ignore[arg-type,return-value]


def test_a_group_that_cannot_be_formed_again_says_what_its_backend_lacks() -> None:
    class Carrier(Backend):
        name = "carrier"
        rank, size = 0, 1

        def send(self, data, dst, tag=0) -> None: ...

        def recv(self, src, tag=0, out=None, timeout=None): ...

        def barrier(self, timeout=None) -> None: ...

    with pytest.raises(BackendUnavailableError, match="has no coordinator"):
        ProcessGroup(Carrier()).reform()
    backend = Carrier()
    backend.session = place().session
    with pytest.raises(BackendUnavailableError, match="cannot be used in another generation") as raised:
        ProcessGroup(backend).reform()
    assert "give Carrier a method renew" in raised.value.hint


def test_a_registered_backend_is_what_a_job_asks_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    class Carrier(SimulatedBackend):
        name = "carrier"

    register("carrier", lambda where: Carrier(where.session, Networks(where.session.clock, None, 0), where.timeout))  # type: ignore[arg-type]
    with ferrorpc.init_process_group("carrier") as group:
        assert group.backend == "carrier"
        assert group.all_reduce(np.arange(3)).tolist() == [0, 1, 2]
    monkeypatch.setenv("FERRORPC_BACKEND", "carrier")
    with ferrorpc.init_process_group() as group:
        assert group.backend == "carrier"


def test_whoever_has_no_group_yet_is_not_told_to_form_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    def lose(where: Place) -> Backend:
        raise PeerLostError(1, "killed by signal 9")

    register("carrier", lose)
    with pytest.raises(PeerLostError, match="rank 1 was lost: killed by signal 9") as raised:
        ferrorpc.init_process_group("carrier")
    assert (raised.value.rank, raised.value.retryable) == (1, True)
    assert "reform" not in str(raised.value)
    assert "call ferrorpc.init_process_group() again" in raised.value.hint
    ferrorpc.init_process_group().close()


def test_a_backend_that_nobody_registered_is_refused_before_a_job_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"backend='gloo' \(from argument\) is not one of auto, grpc, simulated, nccl, hybrid"
    ):
        ferrorpc.init_process_group("gloo", coordinator="nowhere.invalid:1")
    with pytest.raises(ConfigError, match=r"transport='shm' \(from argument\) is not one of (.|\n)*try: give one of these"):
        ferrorpc.init_process_group(transport="shm", coordinator="nowhere.invalid:1")
    monkeypatch.setenv("FERRORPC_BACKEND", "mpi")
    with pytest.raises(ConfigError, match=r"backend='mpi' \(from FERRORPC_BACKEND\) is not one of auto"):
        ferrorpc.init_process_group(coordinator="nowhere.invalid:1")
