"""reform() of groups on GPUs: where the next generation cannot be made, and what it does about what is in flight."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ferrorpc.backends.nccl import backend as over_nccl
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.errors import (
    BackendUnavailableError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
    RendezvousTimeoutError,
)
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.transports.shared_memory import discovery
from tests.fake_gpu.groups import SECONDS, Ranks
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.threads import in_threads, results_of


def test_a_reform_in_vain_keeps_no_lanes_of_the_next_generation_and_may_be_called_again(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a replacement of a lost rank has another NCCL."""
    ranks, introduce, renew, lanes = Ranks(cupy, 2), over_nccl.introduce, SimulatedBackend.renew, list[SimulatedBackend]()

    def differs(*arguments: Any) -> None:
        raise BackendUnavailableError("their versions of NCCL differ")

    def renewed(old: SimulatedBackend, timeout: float) -> SimulatedBackend:
        lanes.append(renew(old, timeout))
        return lanes[-1]

    def in_vain(group: ProcessGroup) -> None:
        with pytest.raises(BackendUnavailableError, match="differ"):
            group.reform()
        with pytest.raises(GroupClosedError, match="came to nothing") as raised:
            group.all_reduce(ranks.array())
        assert "call group.reform() again" in raised.value.hint

    def again(group: ProcessGroup) -> list[float]:
        return cupy.asnumpy(group.reform().all_reduce(ranks.array())).tolist()

    monkeypatch.setattr(over_nccl, "introduce", differs)
    monkeypatch.setattr(SimulatedBackend, "renew", renewed)
    assert ranks.run(in_vain) == [None, None]
    assert [each.transport._closed for each in lanes] == [True, True]
    monkeypatch.setattr(over_nccl, "introduce", introduce)
    assert ranks.run(again) == [[2.0] * 4] * 2


def test_its_timeout_bounds_the_wait_for_a_result_that_a_peer_never_gives(cupy: StandIn) -> None:
    ranks, given_up = Ranks(cupy, 2), threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank:
            assert given_up.wait(SECONDS)
            return
        x = ranks.array()
        group.all_reduce(x, out=x, timeout=3 * SECONDS)
        with pytest.raises(RendezvousTimeoutError):
            group.reform(timeout=0.2)
        given_up.set()

    assert ranks.run(body) == [None, None]
    for group in ranks.groups:
        group.close()


def test_ranks_that_open_each_others_memory_do_so_in_the_next_generation(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, opened = cupy.cuda.runtime, list[bytes]()
    opens = runtime.ipcOpenMemHandle

    def open_handle(handle: bytes) -> int:
        opened.append(handle)
        return int(opens(handle))

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", open_handle)
    with ipc_backends(cupy, 2) as backends:
        groups = [ProcessGroup(backend, timeout=SECONDS) for backend in backends]

        def body(rank: int) -> ProcessGroup:
            with cupy.cuda.Device(0):
                return groups[rank].reform()

        before = len(opened)
        renewed = results_of(in_threads(2, body))
        assert (before, len(opened)) == (2, 4)
        in_threads(2, lambda rank: renewed[rank].close())
    assert not cupy.machine.shared


def test_a_close_by_another_thread_while_it_waits_is_a_close_like_any_other(cupy: StandIn) -> None:
    ranks, over = Ranks(cupy, 2), threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank:
            assert over.wait(SECONDS)
            return
        x = ranks.array()
        group.all_reduce(x, out=x, timeout=3.0)
        ended: list[Any] = []

        def close() -> None:
            with cupy.cuda.Device(0):
                group.close()

        thread = threading.Timer(0.2, lambda: ended.extend(in_threads(1, lambda _: close())))
        thread.start()
        with pytest.raises(FerroError):
            group.reform(timeout=1.0)
        thread.join()
        over.set()
        assert ended == [None]

    assert ranks.run(body) == [None, None]


@pytest.mark.parametrize("leaves", [False, True])
def test_ranks_that_share_a_gpu_hear_what_kept_another_from_the_next_generation(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """And not that their memory cannot be shared, after which they would not try again."""
    identify, struck = discovery.own_identity, list[threading.Thread]()

    def identity() -> Any:
        if threading.current_thread() in struck:
            raise KeyboardInterrupt
        return identify()

    monkeypatch.setattr(discovery, "own_identity", identity)
    with ipc_backends(cupy, 2) as backends:
        groups = [ProcessGroup(backend, timeout=SECONDS) for backend in backends]

        def body(rank: int) -> None:
            with cupy.cuda.Device(0):
                if rank:
                    with pytest.raises(PeerLostError if leaves else GroupAbortedError) as raised:
                        groups[rank].reform()
                    assert raised.value.retryable
                elif leaves:
                    session: Any = backends[rank].session
                    session.rejoin(SECONDS)
                    session.leave()
                else:
                    struck.append(threading.current_thread())
                    with pytest.raises(KeyboardInterrupt):
                        groups[rank].reform()

        assert in_threads(2, body) == [None, None]
        for group in groups:
            group.close()
