"""The generation ends at any time: what is said to be done has its values, and no memory goes that the GPU may still use."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.cuda_ipc import communicator
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import FerroError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.operations.stream import Stream
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import Ranks, end_of
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.worlds import host_lanes, nccl_backends
from tests.threads import in_threads
from tests.waiting import eventually

OPERATIONS = (
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce_scatter",
    "reduce",
    "barrier",
    "stream",
    "stream",
)
KINDS = ["staged", "nccl", "hybrid", pytest.param("cuda_ipc", marks=pytest.mark.shared_memory)]
SECONDS = 30.0


@contextmanager
def backends_of(cupy: StandIn, kind: str, size: int) -> Iterator[Sequence[NcclBackend]]:
    if kind == "cuda_ipc":
        with ipc_backends(cupy, size) as backends:
            yield backends
    elif kind == "staged":
        yield host_lanes(size)
    else:
        yield nccl_backends(cupy, size, kind=HybridBackend if kind == "hybrid" else NcclBackend)


class Call:
    """One operation of a random program, the same on every rank."""

    def __init__(self, chance: random.Random, place: int, size: int) -> None:
        self.operation = chance.choice(OPERATIONS)
        self.count = chance.randint(1, 70)
        self.async_op = chance.random() < 0.5 or self.operation == "stream"
        self.on_gpu = chance.random() < 0.75
        self.strided = chance.random() < 0.3
        self.place, self.root = place, place % size
        self.values = [float(3 * rank + place) for rank in range(size)]

    def start(self, cupy: StandIn, group: ProcessGroup, stream: Stream) -> Any:
        """Its Work or its result."""
        rank, given = group.rank, {"async_op": self.async_op}
        x = self._array(cupy, self.values[rank])
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: group.all_reduce(x, **given),  # type: ignore[call-overload]
            "reduce": lambda: group.reduce(x, self.root, **given),  # type: ignore[call-overload]
            "broadcast": lambda: group.broadcast(x if rank == self.root else None, self.root, **given),  # type: ignore[call-overload]
            "all_gather": lambda: group.all_gather(x, **given),  # type: ignore[call-overload]
            "reduce_scatter": lambda: group.reduce_scatter(  # type: ignore[call-overload]
                [self._array(cupy, self.values[rank] + peer) for peer in range(group.size)], **given
            ),
            "barrier": group.barrier,
            "stream": lambda: stream.all_reduce(x, self.place),
        }
        return calls[self.operation]()

    def _array(self, cupy: StandIn, value: float) -> Any:
        x = np.full(self.count * (2 if self.strided else 1), value, np.float32)
        there = cupy.asarray(x) if self.on_gpu else x
        return there[::2] if self.strided else there

    def expected(self, rank: int) -> list[float] | None:
        """The values of the elements of each array of the result; None where there is none."""
        total = sum(self.values)
        return {
            "all_reduce": [total],
            "reduce": [total] if rank == self.root else None,
            "broadcast": [self.values[self.root]],
            "all_gather": self.values,
            "reduce_scatter": [total + len(self.values) * rank],
            "barrier": None,
            "stream": [total],
        }[self.operation]


def check(cupy: StandIn, group: ProcessGroup, call: Call, started: Any) -> None:
    """That what is said to be done is right. Raises what became of it otherwise."""
    if call.operation == "barrier":
        return
    if call.async_op:
        found = started.wait(host=True)
    else:
        found = started
        group.synchronize()
    expected = call.expected(group.rank)
    if expected is not None:
        for array, value in zip(found if isinstance(found, list) else [found], expected, strict=True):
            home = cupy.asnumpy(array) if isinstance(array, cupy.ndarray) else array
            np.testing.assert_array_equal(home, np.full(call.count, value, np.float32), err_msg=call.operation)


def end_by_abort(group: ProcessGroup, seconds: float) -> None:
    SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + seconds)
    group.abort("enough")


def end_by_leaving(group: ProcessGroup, seconds: float) -> None:
    SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + seconds)
    group._leave("ValueError: gone")


def form_again(cupy: StandIn, group: ProcessGroup, program: Sequence[Call]) -> None:
    """The next generation has nothing of what the last one left behind."""
    with group.reform(SECONDS) as renewed:
        stream = renewed.stream()
        started = [call.start(cupy, renewed, stream) for call in program]
        for call, each in zip(program, started, strict=True):
            check(cupy, renewed, call, each)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_to_be_done_is_right_whenever_the_generation_ends(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    # On a busy machine a rank may need longer for closing the others' memory than these wait for it after an abort.
    monkeypatch.setattr(communicator, "ABORT_SECONDS", SECONDS)
    chance = random.Random(seed)
    size = chance.randint(1, 4)
    program = [Call(chance, place, size) for place in range(chance.randint(3, 25))]
    ender, seconds = chance.randrange(size), 0.02 * chance.random()
    how = chance.choice([end_by_abort, end_by_abort, end_by_leaving, None])
    # They outlast the program: memory goes back in the order of the stream it was made for.
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(size)] if seed % 2 and kind == "cuda_ipc" else None

    def body(group: ProcessGroup) -> None:
        started: list[tuple[Call, Any]] = []
        order = random.Random(seed * size + group.rank)
        with suppress(FerroError):
            stream = group.stream()
            for call in program:
                started.append((call, call.start(cupy, group, stream)))
                if order.random() < 0.5:
                    check(cupy, group, *started.pop(order.randrange(len(started))))
        for call, left in started:
            with suppress(FerroError):
                check(cupy, group, call, left)
        if how is end_by_abort:
            end_of(group, GroupAbortedError)
            form_again(cupy, group, program)

    with backends_of(cupy, kind, size) as backends:
        groups = [ProcessGroup(backend, SECONDS) for backend in backends]

        def on_thread(number: int) -> None:
            if number == size:
                return None if how is None else how(groups[ender], seconds)
            current: AbstractContextManager[Any] = nullcontext() if streams is None else streams[number]
            with cupy.cuda.Device(0 if kind == "cuda_ipc" else number), current:
                body(groups[number])

        assert in_threads(size + 1, on_thread) == [None] * (size + 1)
        for group in groups:
            group.close()


@pytest.mark.usefixtures("launched_within_the_call")
def test_memory_of_what_was_in_its_stream_is_kept_until_the_gpu_has_come_past_it(cupy: StandIn) -> None:
    """The GPU may use it for as long: to let go of it would give it to whoever asks next."""
    ranks = Ranks(cupy, 2)
    released: list[bool] = []
    memories: list[weakref.ref[Any]] = []

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(np.ones((2, 6), np.float32))
        group.all_reduce(x)
        group.synchronize()
        context: Any = group._backend.context  # type: ignore[attr-defined]
        context.program.stream.own.fake.enqueue(lambda: bool(released))
        calls = (group.all_reduce, group.all_gather, lambda x, async_op: group.reduce_scatter([x, x], async_op=async_op))
        works = [call(x, async_op=True) for call in calls]
        memories.append(weakref.ref(x.data.mem))
        if group.rank == 0:
            eventually(lambda: len(memories) == 2, "both have begun", SECONDS)
            group.abort("enough")
        for work in works:
            with pytest.raises(GroupAbortedError, match="enough"):
                work.wait(host=True)

    def is_given_back() -> bool:
        gc.collect()  # an error and the Work that raised it know each other
        return not any(memory() for memory in memories)

    assert ranks.run(body) == [None, None]
    for group in ranks.groups:
        group.close()
    assert not is_given_back()
    released.append(True)
    eventually(is_given_back, "all memory is given back", SECONDS)


def test_a_broadcast_whose_array_does_not_come_in_time_ends_the_generation(cupy: StandIn) -> None:
    """The root's host waits for a small array before anything is sent, and the others wait for the root."""
    released: list[bool] = []

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.asarray(np.ones(4, np.float32))
            stream.fake.enqueue(lambda: bool(released))
            with pytest.raises(FerroError, match="the GPU did not come to the end of a copy"):
                group.broadcast(x if group.rank == 0 else None, root=0, timeout=0.2 if group.rank == 0 else SECONDS)
            released.append(True)
            assert group._backend.latch.cause is not None

    run_groups([ProcessGroup(backend) for backend in host_lanes(3)], body)
