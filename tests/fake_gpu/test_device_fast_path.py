"""all_reduce of plain arrays on a GPU takes the fast path, with the same results, errors, order and memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.cuda_ipc.backend import CudaIpcBackend
from ferrorpc.backends.device.all_reduce import AllReduceExecution, AllReducePrepared
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.device.completion import IDLE_SECONDS, NOTIFY_SECONDS, CompletionWatcher
from ferrorpc.backends.device.execution import ImmediateExecution
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.collectives.progress import Progress
from ferrorpc.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    LimitExceededError,
    TensorMismatchError,
    UsageError,
)
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import Ranks, end_of
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.torch_gpu import DEVICE, torch, torch_on
from tests.fake_gpu.worlds import nccl_backends
from tests.waiting import eventually

SHAPE = (3, 4)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that took it."""
    found: list[Any] = []
    start_at = AllReducePrepared.start_at

    def started(prepared: AllReducePrepared, key: Any, *arguments: Any) -> Any:
        found.append(key)
        return start_at(prepared, key, *arguments)

    monkeypatch.setattr(AllReducePrepared, "start_at", started)
    return found


def world(cupy: StandIn, size: int, body: Callable[[ProcessGroup], Any], kind: type[DeviceBackend] = NcclBackend) -> list[Any]:
    def on_rank(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            return body(group)

    return run_groups([ProcessGroup(backend, 10.0) for backend in nccl_backends(cupy, size, kind=kind)], on_rank)


def numbers(rank: int) -> np.ndarray[Any, Any]:
    return np.arange(12, dtype=np.float32).reshape(SHAPE) + 100 * rank


TOTAL = numbers(0) + numbers(1)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("place", ["new", "itself", "another", "another object over its memory"])
@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
def test_a_plain_array_takes_it_wherever_the_result_goes(
    cupy: StandIn, taken: list[Any], kind: type[DeviceBackend], place: str, async_op: bool
) -> None:
    def body(group: ProcessGroup) -> None:
        for _ in range(3):
            x = cupy.asarray(numbers(group.rank))
            out = {"new": None, "itself": x, "another": cupy.empty(SHAPE, np.float32)}.get(place, x.reshape(SHAPE))
            found: Any = group.all_reduce(x, out=out, async_op=async_op)
            total = found.wait() if async_op else found
            assert out is None or total is out
            np.testing.assert_array_equal(cupy.asnumpy(total), TOTAL)
            unchanged = place in ("new", "another")
            np.testing.assert_array_equal(cupy.asnumpy(x), numbers(group.rank) if unchanged else TOTAL)

    world(cupy, 2, body, kind)
    assert len(taken) == 6


@pytest.mark.shared_memory
def test_where_ranks_share_a_gpu_it_is_taken_too(cupy: StandIn, taken: list[Any]) -> None:
    def body(group: ProcessGroup) -> None:
        for _ in range(3):
            np.testing.assert_array_equal(cupy.asnumpy(group.all_reduce(cupy.asarray(numbers(group.rank)))), TOTAL)

    with ipc_backends(cupy, 2) as backends:
        assert isinstance(backends[0], CudaIpcBackend)
        run_groups([ProcessGroup(backend) for backend in backends], body)
    assert len(taken) == 6


@pytest.mark.parametrize("op", ["sum", "mean", "product", "min", "max"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float16", "complex64"])
def test_it_takes_what_the_general_way_takes_and_refuses_what_that_refuses(cupy: StandIn, dtype: str, op: str) -> None:
    def body(group: ProcessGroup) -> list[Any]:
        x = cupy.asarray((numbers(group.rank) % 3).astype(dtype))
        found: list[Any] = []
        for strides in ((2, 1), (1, 1), (2, 1)):  # the general path, the fast one, and the general one again
            wide = cupy.empty((3, 8), x.dtype)
            given = wide[:, :: strides[0]][:, :4]
            given[...] = x
            try:
                found.append(cupy.asnumpy(group.all_reduce(given if strides[0] == 2 else x, op)).tolist())
            except TensorMismatchError as error:
                found.append(str(error))
        return found

    for general, short, again in world(cupy, 2, body):
        assert general == short == again


def test_what_is_not_plain_takes_the_general_way(cupy: StandIn, taken: list[Any]) -> None:
    class Own(cupy.ndarray):  # type: ignore[name-defined, misc]
        """Somebody's array."""

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(numbers(group.rank))
        group.all_reduce(x)
        group.barrier()
        before = len(taken)
        own = Own(SHAPE, np.float32, x.data)
        wide = cupy.empty((3, 8), np.float32)
        for given, out, expected in (
            (x.T, None, TOTAL.T),
            (x[::2], None, TOTAL[::2]),
            (x, wide[:, ::2], TOTAL),
            (own, None, TOTAL),
            (x[:0], None, TOTAL[:0]),
            (numbers(group.rank), None, TOTAL),
            (7, None, np.array(14)),
        ):
            found: Any = group.all_reduce(given, out=out)
            found = cupy.asnumpy(found) if isinstance(found, cupy.ndarray) else found
            np.testing.assert_array_equal(found, expected)
        group.barrier()
        assert len(taken) == before

    world(cupy, 2, body)


def test_wrong_arguments_are_refused_in_the_words_of_the_general_way(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        flat = cupy.asarray(np.ones(8, np.float32))
        x = flat[:4]
        for _ in range(2):  # before and after such a call is known
            for error, words, arguments in (
                (UsageError, "overlaps the input in part", {"out": flat[2:6]}),
                (TensorMismatchError, r"out is float32\[8\]", {"out": flat}),
                (TensorMismatchError, r"out is float64\[4\]", {"out": cupy.empty(4, np.float64)}),
                (UsageError, "out is a list", {"out": [1.0]}),
                (UsageError, "op", {"op": "concatenate"}),
                (UsageError, "op", {"op": []}),
                (UsageError, "timeout", {"timeout": -1.0}),
                (UsageError, "timeout", {"timeout": "long"}),
            ):
                with pytest.raises(error, match=words):
                    group.all_reduce(x, **arguments)
            np.testing.assert_array_equal(cupy.asnumpy(group.all_reduce(x)), np.full(4, 2.0))

    world(cupy, 2, body)


def test_an_array_on_another_gpu_is_refused(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        near = cupy.asarray(numbers(0))
        with cupy.cuda.Device(1 - group.rank):
            far = cupy.asarray(numbers(0))
        for x, out in ((far, None), (near, far)) * 2:
            with pytest.raises(TensorMismatchError, match="GPU"):
                group.all_reduce(x, out=out)
            group.all_reduce(near)

    world(cupy, 2, body)


def test_arrays_live_until_the_gpu_is_through_and_not_longer(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)
    alive: list[Any] = []

    def body(group: ProcessGroup) -> None:
        context = group._backend.context  # type: ignore[attr-defined]
        x = cupy.asarray(numbers(group.rank))
        memory = weakref.ref(x.data.mem)
        total = group.all_reduce(x)
        (running,) = [each for each in context.in_flight() if isinstance(each, AllReduceExecution)] or [None]
        del x
        alive.append((memory() is not None, running is not None))
        del running
        group.synchronize()
        assert memory() is None
        np.testing.assert_array_equal(cupy.asnumpy(total), TOTAL)

    assert ranks.run(body) == [None] * len(ranks.groups)
    assert all(memory or not flying for memory, flying in alive)


@pytest.mark.parametrize("how", ["asks", "is to be told"])
@pytest.mark.usefixtures("launched_within_the_call")
def test_who_waits_for_the_completion_hastens_its_watcher(cupy: StandIn, how: str) -> None:
    ranks, asked = Ranks(cupy, 2), threading.Event()

    def body(group: ProcessGroup) -> None:
        context = group._backend.context  # type: ignore[attr-defined]
        x = cupy.asarray(numbers(group.rank))
        group.all_reduce(x)
        group.synchronize()
        told = threading.Event()
        if group.rank == 0:
            work = group.all_reduce(x, async_op=True)
            (running,) = context.in_flight()
            watcher = context._watchers[running.launch_queue]
            assert watcher.nap_seconds == IDLE_SECONDS
            if how == "asks":
                assert not work.done()
            else:
                work.on_done(told.set)
            assert watcher.nap_seconds == NOTIFY_SECONDS
            asked.set()
        else:
            assert asked.wait(10)
            work = group.all_reduce(x, async_op=True)
            work.on_done(told.set)
        work.wait(host=True)
        assert work.done()
        if how == "is to be told":
            assert told.wait(10)

    assert ranks.run(body) == [None] * len(ranks.groups)


def test_where_its_watcher_has_no_thread_later_operations_are_watched_nevertheless(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refusals = Progress.submit, [LimitExceededError("the system refuses a thread")]

    def submitted(progress: Progress, execution: Any, *arguments: Any) -> Any:
        if refusals and isinstance(execution, CompletionWatcher):
            raise refusals.pop()
        return submit(progress, execution, *arguments)

    def body(group: ProcessGroup) -> bool:
        x, refused = cupy.asarray(numbers(group.rank)), False
        try:
            group.all_reduce(x)
        except LimitExceededError:
            refused = True
        works = [group.all_reduce(x, async_op=True) for _ in range(3)]
        eventually(lambda: all(work.done() for work in works), "all are noticed to be complete", 10)
        return refused

    monkeypatch.setattr(Progress, "submit", submitted)
    assert sorted(world(cupy, 2, body)) == [False, True]


def test_it_keeps_its_place_behind_what_still_has_to_announce_itself(cupy: StandIn, taken: list[Any]) -> None:
    def body(group: ProcessGroup) -> None:
        gathered = group.all_gather(cupy.asarray(numbers(group.rank)), async_op=True)
        totals = [group.all_reduce(cupy.asarray(numbers(group.rank) + item), async_op=True) for item in range(3)]
        last = group.all_reduce(cupy.asarray(numbers(group.rank)))
        for item, total in enumerate(totals):
            np.testing.assert_array_equal(cupy.asnumpy(total.wait()), TOTAL + 2 * item)
        np.testing.assert_array_equal(cupy.asnumpy(last), TOTAL)
        np.testing.assert_array_equal(cupy.asnumpy(gathered.wait()[1]), numbers(1))

    world(cupy, 2, body)
    assert len(taken) == 8


@pytest.mark.parametrize("other", ["another shape", "another operator", "a barrier", "a gather", "on the host"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_call_different_things_get_both_signatures(cupy: StandIn, other: str, rank: int) -> None:
    ranks = Ranks(cupy, 2, HybridBackend)

    def body(group: ProcessGroup) -> str:
        x = cupy.asarray(numbers(group.rank))
        group.all_reduce(x)
        others: dict[str, Callable[[], Any]] = {
            "another shape": lambda: group.all_reduce(x[:2]),
            "another operator": lambda: group.all_reduce(x, op="max"),
            "a barrier": group.barrier,
            "a gather": lambda: group.all_gather(x),
            "on the host": lambda: group.all_reduce(numbers(0)),
        }
        call = (lambda: group.all_reduce(x)) if group.rank == rank else others[other]
        try:
            call()
        except CollectiveMismatchError as error:
            return str(error)
        return str(end_of(group, CollectiveMismatchError))

    for text in ranks.run(body):
        assert "all_reduce(op=sum, float32[3,4]) by NCCL" in text


@pytest.mark.parametrize("way", ["the fast path", "the general path"])
@pytest.mark.parametrize("first", [False, True], ids=["the first", "a later one"])
def test_one_whose_peer_never_comes_ends_in_its_deadline_and_names_it(cupy: StandIn, first: bool, way: str) -> None:
    """Although an aborted communicator lets the GPU come past what was in it: that is no result."""
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(numbers(group.rank))
        if first:
            group.all_reduce(x)
        if group.rank == 0:
            work = group.all_reduce(x if way == "the fast path" else x.T, async_op=True, timeout=0.5)
            with pytest.raises(CollectiveTimeoutError, match=r"after 0.5 s, .* by NCCL #[12] waits for"):
                work.wait(host=True)
        else:
            end_of(group, GroupAbortedError)

    assert ranks.run(body) == [None] * len(ranks.groups)


@pytest.mark.parametrize(("owner", "method"), [(AllReducePrepared, "start_at"), (ImmediateExecution, "enter")])
def test_who_is_interrupted_while_it_starts_ends_the_group(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, owner: type[Any], method: str
) -> None:
    ranks, original, armed = Ranks(cupy, 2), getattr(owner, method), threading.Event()

    def interrupted(self: Any, *arguments: Any) -> Any:
        if self.context.rank == 0 and armed.is_set():
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, interrupted)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(numbers(group.rank))
        group.all_reduce(x)
        if group.rank == 0:
            group.barrier()
            armed.set()
            with pytest.raises(KeyboardInterrupt):
                group.all_reduce(x)
        else:
            with suppress(GroupAbortedError):  # where it comes to either later than the other
                group.barrier()
                group.all_reduce(x)
        assert "KeyboardInterrupt during all_reduce" in str(end_of(group, GroupAbortedError))

    assert ranks.run(body) == [None] * len(ranks.groups)


def test_a_closed_group_refuses_it(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(numbers(group.rank))
        group.all_reduce(x)
        group.close()
        with pytest.raises(GroupClosedError):
            group.all_reduce(x)

    assert ranks.run(body) == [None] * len(ranks.groups)


@pytest.mark.parametrize("place", ["new", "itself", "another"])
def test_tensors_take_it(cupy: StandIn, taken: list[Any], place: str) -> None:
    with torch_on(cupy) as gpus:

        def body(group: ProcessGroup) -> None:
            device = cupy.machine.gpus[group.rank]
            with cupy.cuda.Device(group.rank), gpus.on(device.new_stream()):
                for _ in range(3):
                    x = torch.from_numpy(numbers(group.rank)).to(f"{DEVICE}:{group.rank}")
                    out = {"new": None, "itself": x, "another": torch.empty_like(x)}[place]
                    total: Any = group.all_reduce(x, out=out)
                    assert type(total) is type(x)
                    assert total.device == x.device
                    np.testing.assert_array_equal(total.cpu().numpy(), TOTAL)
                before = len(taken)
                np.testing.assert_array_equal(group.all_reduce(x.t(), out=None).cpu().shape, (4, 3))
                with pytest.raises(UsageError, match="requires a gradient"):
                    group.all_reduce(x.clone().requires_grad_())
                with pytest.raises(UsageError, match="layout"):
                    group.all_reduce(torch.from_numpy(numbers(0)).to_sparse())
                group.barrier()
                assert len(taken) == before

        groups = [ProcessGroup(backend) for backend in nccl_backends(cupy, 2)]
        run_groups(groups, body)
    assert len(taken) == 6
