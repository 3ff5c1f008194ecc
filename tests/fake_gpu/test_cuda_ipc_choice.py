"""When "auto" shares a GPU's memory, and what it says of that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.backends import gpu
from ferrorpc.backends.cuda_ipc.communicator import IpcCommunicator
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import Peer
from tests.integration.test_grpc_backend import GrpcWorld


def peer(rank: int, uuid: str | None, host: str = "host") -> Peer:
    return Peer(rank, f"member-{rank}", host, labels=() if uuid is None else (("gpu", uuid), ("nccl", "22809")))


def test_auto_shares_memory_where_ranks_of_one_host_have_one_gpu() -> None:
    assert gpu.shares_gpu([peer(0, "a"), peer(1, "a")])
    assert gpu.shares_gpu([peer(0, "a"), peer(1, "a"), peer(2, "b")])
    assert not gpu.shares_gpu([peer(0, "a"), peer(1, "b")]), "each has its own: that is NCCL's"
    assert not gpu.shares_gpu([peer(0, "a"), peer(1, None)])
    assert not gpu.shares_gpu([peer(0, "a"), peer(1, "a", "elsewhere")])


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_auto_and_what_it_does_where_memory_cannot_be_shared(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    monkeypatch.setattr(gpu, "shares_gpu", lambda peers: True)
    monkeypatch.setattr(gpu, "nccl_usable", lambda peers: False)
    with caplog.at_level(logging.WARNING), GrpcWorld(2, transport=transport) as world:
        shares = transport == "shared_memory"
        assert [backend.name for backend in world.backends] == ["cuda_ipc" if shares else "grpc"] * 2
        assert ("backend 'auto' is gRPC: GPU memory is shared among ranks of one host" in caplog.text) is not shares


@pytest.mark.parametrize("has_mps", [False, True])
def test_one_rank_says_how_those_that_take_turns_on_a_gpu_would_not_have_to(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_mps: bool
) -> None:
    def attribute(number: int, index: int) -> int:
        assert (number, index) == (133, 0)
        return int(has_mps)

    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetAttribute", attribute)
    monkeypatch.setattr(gpu, "shares_gpu", lambda peers: True)
    monkeypatch.setattr(gpu, "nccl_usable", lambda peers: False)
    monkeypatch.setattr(gpu, "ranks_on", lambda uuid, peers: [0, 1] if uuid == device_of(cupy, 0).uuid else [])
    with caplog.at_level(logging.WARNING), GrpcWorld(2, transport="shared_memory"):
        assert caplog.text.count("ranks 0, 1 take turns on one GPU") == (not has_mps)


def test_whether_ranks_take_turns_is_unknown_to_an_older_cuda(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, index: int) -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(1)

    assert device_of(cupy, 0).takes_turns
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetAttribute", refuse)
    assert not device_of(cupy, 0).takes_turns


def test_the_ranks_on_a_gpu() -> None:
    assert gpu.ranks_on("a", [peer(0, "a"), peer(1, "b"), peer(2, "a"), peer(3, None)]) == [0, 2]


def fail() -> None:
    raise LookupError("no libnvrtc-builtins.so\udce9")


def failing_on_rank_1(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], None]) -> None:
    made = IpcCommunicator.__init__

    def makes(communicator: Any, device: Any, clock: Any, own: Any, *arguments: Any) -> None:
        if own.rank == 1:
            fails()
        made(communicator, device, clock, own, *arguments)

    makes_in_library = FunctionType(makes.__code__, {"__name__": "cupy"}, closure=makes.__closure__)
    monkeypatch.setattr(IpcCommunicator, "__init__", makes_in_library)
    monkeypatch.setattr(gpu, "shares_gpu", lambda peers: True)
    monkeypatch.setattr(gpu, "nccl_usable", lambda peers: False)


def test_auto_is_the_same_on_all_ranks_whatever_one_of_them_meets(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a host has no NVRTC to compile kernels with."""
    failing_on_rank_1(monkeypatch, FunctionType(fail.__code__, {"__name__": "cupy.cuda.compiler", "LookupError": LookupError}))
    with caplog.at_level(logging.WARNING), GrpcWorld(2, transport="shared_memory") as world:
        assert [backend.name for backend in world.backends] == ["grpc"] * 2
    assert caplog.text.count("cannot share GPU memory: rank 1: LookupError: no libnvrtc-builtins.so\\udce9") == 2
    assert not cupy.machine.shared


def test_what_a_signal_handler_raises_meanwhile_is_its_rank_s(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_on_rank_1(monkeypatch, fail)
    with pytest.raises(LookupError, match="no libnvrtc"), GrpcWorld(2, transport="shared_memory"):
        pass
    assert not cupy.machine.shared
