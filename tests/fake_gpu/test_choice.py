"""Which backend a rank gets, on which GPU, and what it says when that cannot be."""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends import gpu
from ferrorpc.backends.nccl import choose
from ferrorpc.backends.registry import Place, create
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import BackendUnavailableError, TensorMismatchError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import Peer


def peer(rank: int, uuid: str | None = None, nccl: str = "22809") -> Peer:
    labels = () if uuid is None else (("gpu", uuid), ("nccl", nccl))
    return Peer(rank, f"member-{rank}", "host", labels=labels)


def test_auto_takes_nccl_where_every_rank_has_a_gpu_of_its_own_and_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.nccl_usable([peer(0, "GPU-a"), peer(1, "GPU-b")])
    with caplog.at_level(logging.WARNING):
        assert not gpu.nccl_usable([peer(0), peer(1)])
        assert not caplog.records, "where nobody has a GPU there is nothing to say"
        assert not gpu.nccl_usable([peer(0, "GPU-a"), peer(1)])
        assert "ranks 1 have no GPU" in caplog.text
        assert not gpu.nccl_usable([peer(0, "GPU-a"), peer(1, "GPU-a")])
        assert "ranks 0 and 1 are on one GPU" in caplog.text
        ipc = Peer(0, "member-0", "host", labels=(("gpu", "GPU-a"),))
        assert not gpu.nccl_usable([ipc, peer(1, "GPU-b")]), "a rank that asked for cuda_ipc says nothing of NCCL"
        assert not gpu.nccl_usable([peer(0, "GPU-a"), peer(1, "GPU-b", "23000")])
        assert "different versions" in caplog.text


def test_a_program_without_cupy_says_nothing_of_gpus_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert gpu.join_labels("auto", None, 0) == {}
    assert gpu.join_labels("grpc", None, 0) == {}
    assert "cupy" not in sys.modules


def test_what_lacks_is_an_error_where_it_was_asked_for_and_a_warning_under_auto(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    for backend in ("nccl", "hybrid"):
        with pytest.raises(BackendUnavailableError) as raised:
            gpu.join_labels(backend, None, 0)
        assert "pip install 'ferrorpc[gpu]'" in raised.value.hint
    with caplog.at_level(logging.WARNING):
        labels = gpu.join_labels("auto", None, 0)
    assert "backend 'auto' will not use NCCL, because NCCL needs a binding" in caplog.text
    assert "pip install 'ferrorpc[gpu]'" in caplog.text
    peers = [Peer(rank, f"m{rank}", labels=tuple(labels.items())) for rank in range(2)]
    assert gpu.shares_gpu(peers), "which needs no NCCL"
    assert not gpu.nccl_usable(peers)


def test_a_member_says_its_gpu_and_its_nccl(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "open_nccl", lambda: FakeNccl(cupy.machine).api(0))
    assert gpu.join_labels("auto", None, 3) == {"gpu": "GPU-66616b6520475055-at-0000:1A:00.0", "nccl": "22809"}


@pytest.mark.parametrize(("asked", "local_rank", "index"), [(None, None, 0), (5, 1, 5), (None, 2, 2), (None, 9, 1)])
def test_a_ranks_gpu_is_the_one_asked_for_else_by_its_place_on_the_node(
    cupy: StandIn, asked: int | None, local_rank: int | None, index: int
) -> None:
    assert gpu.device_for(asked, local_rank).index == index


def test_a_gpu_that_is_not_there_is_refused(cupy: StandIn) -> None:
    with pytest.raises(BackendUnavailableError, match="there is no GPU 8; CuPy sees 8"):
        gpu.device_for(8, None)


@pytest.mark.parametrize("name", ["grpc", "auto"])
@pytest.mark.parametrize(("asked", "local_rank", "index"), [(5, 1, 5), (None, 2, 2), (None, None, 3)])
def test_a_ranks_gpu_is_the_same_where_arrays_go_by_the_host(
    cupy: StandIn, name: str, asked: int | None, local_rank: int | None, index: int
) -> None:
    session = LocalWorld(1, clock=SYSTEM_CLOCK).session(0)
    with cupy.cuda.Device(0):
        cupy.cuda.Device(3).use()  # which stays where nobody knows better
        with ProcessGroup(create(name, Place(session, None, device=asked, local_rank=local_rank))) as group:
            assert cupy.cuda.Device().id == index
            assert group.all_reduce(cupy.asarray(np.ones(2))).device.id == index


def test_a_rank_whose_gpu_nobody_has_chosen_yet_leaves_nothing_on_the_first_one(cupy: StandIn) -> None:
    session = LocalWorld(1, clock=SYSTEM_CLOCK).session(0)
    with ProcessGroup(create("grpc", Place(session, None))) as group:
        cupy.cuda.Device(3).use()
        assert group.all_reduce(cupy.asarray(np.ones(2))).device.id == 3
    assert [gpu.index for gpu in cupy.machine.gpus if gpu.has_context] == [3]


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused_by_every_backend(cupy: StandIn) -> None:
    session = LocalWorld(1, clock=SYSTEM_CLOCK).session(0)
    with pytest.raises(BackendUnavailableError, match="there is no GPU 8; CuPy sees 8"):
        create("grpc", Place(session, None, device=8))


def test_cupy_without_a_gpu_is_no_matter_where_none_was_asked_for(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(100)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", none)
    session = LocalWorld(1, clock=SYSTEM_CLOCK).session(0)
    with ProcessGroup(create("grpc", Place(session, None, local_rank=0))) as group:
        assert group.all_reduce(1.0) == 1.0


@pytest.mark.parametrize("name", ["nccl", "hybrid"])
def test_a_world_of_one_runs_on_its_gpu(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(choose, "open_nccl", lambda: FakeNccl(cupy.machine).api(2))
    session = LocalWorld(1, clock=SYSTEM_CLOCK).session(0)
    with ProcessGroup(create(name, Place(session, None, local_rank=2))) as group:
        assert (group.backend, cupy.cuda.Device().id) == (name, 2)
        work: Any = group.all_reduce(cupy.asarray(np.arange(3.0)), async_op=True)
        np.testing.assert_array_equal(cupy.asnumpy(work.wait()), np.arange(3.0))
        with cupy.cuda.Device(1):
            elsewhere = cupy.asarray(np.ones(2))
        with pytest.raises(TensorMismatchError, match="on GPU 1, but this rank's communicator is on GPU 2"):
            group.all_reduce(elsewhere, async_op=True)
    cupy.cuda.Device(0).use()
