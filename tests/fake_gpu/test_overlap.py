"""CuPy arrays over host lanes, chunk by chunk: same bits, what comes before what, and what is left when it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.staging import POOL_BYTES, Staging
from ferrorpc.collectives.arena.all_reduce import TwoShot
from ferrorpc.collectives.arena.select import prepare
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.reference import check_same, reduced
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key
from tests.fake_gpu.events import SECONDS, Events, same, with_small_slots, world
from tests.unit.collectives.shared_world import SharedWorld

SLOT = 256 << 10
SLOTS = 3
MIB = 1 << 20
CHUNK = MIB // 4
"""Elements of float32 that travel together."""
EDGES = [0, 1, SLOT // 4 - 1, SLOT // 4, SLOT // 4 + 1, CHUNK + 1, 5 * CHUNK + 3]

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True, params=[POOL_BYTES, 0], ids=["pinned", "ordinary"])
def small_slots(cupy: StandIn, request: pytest.FixtureRequest) -> Iterator[None]:
    """Every GPU's slots are smaller than what travels together, so that edges of both kinds fall everywhere; arrays lie in
    pinned memory on the host, or in ordinary memory."""
    yield from with_small_slots(cupy, SLOT, SLOTS, request.param)


def staging(cupy: StandIn, index: int) -> Staging:
    found: Staging = device_of(cupy, index).staging
    return found


def floats(count: int, rank: int) -> Array:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", EDGES)
def test_reductions_have_the_bits_of_the_left_fold_at_every_edge(cupy: StandIn, size: int, count: int) -> None:
    everyones = [floats(count, rank) for rank in range(size)]
    total, mean = (reduced(everyones, op, DType.FLOAT32) for op in (ReduceOp.SUM, ReduceOp.MEAN))

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(everyones[group.rank])
        same(cupy, group.all_reduce(x), total, "all_reduce")
        same(cupy, group.all_reduce(x, op="mean", async_op=True).wait(), mean, "all_reduce in flight")
        same(cupy, x, everyones[group.rank], "the input")
        found = group.reduce(x, root=size - 1)
        assert (found is None) == (group.rank != size - 1)
        if found is not None:
            same(cupy, found, total, "reduce")
        same(cupy, group.reduce_scatter(x), np.array_split(total, size)[group.rank], "reduce_scatter")
        strided = cupy.asarray(np.zeros(2 * count, np.float32))[::2]
        assert group.all_reduce(x, out=strided) is strided
        same(cupy, strided.copy(), total, "into strided memory")
        assert group.all_reduce(x, out=x) is x
        same(cupy, x, total, "in place")

    world(size, cupy, body)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", EDGES)
def test_moves_bring_what_was_sent_at_every_edge(cupy: StandIn, size: int, count: int) -> None:
    everyones = [floats(count + rank, rank) for rank in range(size)]
    root = size - 1

    def body(group: ProcessGroup) -> None:
        me = group.rank
        x = cupy.asarray(everyones[me])
        same(cupy, group.broadcast(x, root=root), everyones[root], "broadcast")
        place = cupy.asarray(np.zeros(count + root, np.float32))
        assert group.broadcast(x if me == root else None, root=root, out=place, async_op=True).wait() is place
        same(cupy, place, everyones[root], "broadcast into out")
        for rank, found in enumerate(group.all_gather(x)):
            same(cupy, found, everyones[rank], f"all_gather, item {rank}")
        for rank, found in enumerate(group.gather(x, root=0) or []):
            same(cupy, found, everyones[rank], f"gather, item {rank}")
        parts = [cupy.asarray(part) for part in everyones] if me == root else x
        same(cupy, group.scatter(parts, root=root), everyones[me], "scatter")
        for rank, found in enumerate(group.all_to_all([cupy.asarray(floats(count, me)) for _ in range(size)])):
            same(cupy, found, floats(count, rank), f"all_to_all, item {rank}")
        if size > 1:
            work = group.send(x, (me + 1) % size, tag=3, async_op=True)
            before = (me - 1) % size
            out = cupy.asarray(np.zeros(count + before, np.float32))
            assert group.recv(before, tag=3, out=out) is out
            same(cupy, out, everyones[before], "recv")
            work.wait()

    world(size, cupy, body)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "recursive_doubling", "rabenseifner", "tree"])
def test_every_algorithm_has_the_bits_it_has_with_host_arrays(cupy: StandIn, algorithm: str) -> None:
    def body(group: ProcessGroup) -> None:
        for dtype, op in ((np.float32, "sum"), (np.float32, "max"), (np.float16, "mean")):
            x = floats(2 * CHUNK + 5, group.rank).astype(dtype)
            near = group.all_reduce(cupy.asarray(x), op=op, algorithm=algorithm)
            same(cupy, near, group.all_reduce(x, op=op, algorithm=algorithm), algorithm)

    world(4, cupy, body)


def test_arrays_of_both_sorts_in_one_operation(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        x = floats(3 * CHUNK, group.rank)
        total = floats(3 * CHUNK, 0) + floats(3 * CHUNK, 1)
        here = np.zeros_like(total)
        assert group.all_reduce(cupy.asarray(x), out=here) is here
        check_same(here, total, "a GPU's array into the host's memory")
        there = cupy.asarray(np.zeros_like(total))
        assert group.all_reduce(x, out=there) is there
        same(cupy, there, total, "a host's array into a GPU's memory")
        parts = [cupy.asarray(x[:CHUNK]), x[CHUNK:]]
        for rank, found in enumerate(group.all_to_all(parts)):
            sent = floats(3 * CHUNK, rank)
            same(cupy, cupy.asarray(found), sent[:CHUNK] if group.rank == 0 else sent[CHUNK:], "all_to_all of both")

    world(2, cupy, body)


CHUNKS = 12
"""Of a slot each: three messages' worth."""
COUNT = CHUNKS * SLOT // 4


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "send"])
def test_the_first_chunk_is_sent_before_the_last_has_come_down(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The GPU does not give its last chunk before something was sent: without overlap nothing would ever be sent."""
    events = Events(cupy, monkeypatch)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(floats(COUNT, group.rank))
        group.barrier()
        if group.rank == 0:
            events.clear({f"down {rank}": (CHUNKS - 1, f"sent {rank}") for rank in range(2)})
        group.barrier()
        operate(group, cupy, call, x)

    world(2, cupy, body)
    assert events.seen.count("down 0") == CHUNKS
    assert events.seen.index("sent 0") < CHUNKS * 3


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "send"])
def test_the_first_chunk_goes_up_before_the_last_has_arrived(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Rank 0's GPU does not give its last chunk before something went up to rank 1's."""
    events = Events(cupy, monkeypatch)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(floats(COUNT, group.rank))
        cupy.cuda.get_current_stream().synchronize()
        group.barrier()
        if group.rank == 0:
            events.clear({"down 0": (CHUNKS - 1, "up 1")})
        group.barrier()
        operate(group, cupy, call, x)

    world(2, cupy, body)
    downs = [place for place, event in enumerate(events.seen) if event == "down 0"]
    assert events.seen.index("up 1") < downs[CHUNKS - 1]


def operate(group: ProcessGroup, cupy: StandIn, call: str, x: Any) -> None:
    """The operation between ranks 0 and 1; its result is checked."""
    mine = cupy.asarray(np.zeros(COUNT, np.float32))
    if call == "all_reduce":
        same(cupy, group.all_reduce(x), floats(COUNT, 0) + floats(COUNT, 1), call)
    elif call == "broadcast":
        same(cupy, group.broadcast(x, out=mine), floats(COUNT, 0), call)
    elif group.rank == 0:
        group.send(x, 1)
    else:
        same(cupy, group.recv(0, out=mine), floats(COUNT, 0), call)


def test_nothing_leaves_before_the_callers_stream_has_made_it(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns at once; messages wait for the GPU, and other operations do not."""
    events = Events(cupy, monkeypatch)

    def body(group: ProcessGroup) -> None:
        release = threading.Event()
        x = cupy.asarray(np.zeros(COUNT, np.float32))
        y = cupy.asarray(np.ones(COUNT, np.float32))
        cupy.cuda.get_current_stream().synchronize()
        stuck = cupy.cuda.Stream(non_blocking=True)
        stuck.fake.enqueue(release.is_set)
        with stuck:
            late = x + (group.rank + 1.0)
            work = group.all_reduce(late, async_op=True)
            del late
        group.barrier()
        before = events.seen.count(f"down {group.rank}")
        same(cupy, group.all_reduce(y), np.full(COUNT, 2, np.float32), "another stream's array meanwhile")
        assert events.seen.count(f"down {group.rank}") == before + CHUNKS
        assert not work.done()
        release.set()
        with stuck:
            same(cupy, work.wait(), np.full(COUNT, 3, np.float32), "what came late")

    world(2, cupy, body)


def test_who_waits_on_the_host_finds_the_result_on_the_gpu(cupy: StandIn) -> None:
    """Nothing else moves the fake GPU's queue: what it holds then is what is read here."""

    def body(group: ProcessGroup) -> None:
        found = group.all_reduce(cupy.asarray(floats(COUNT, group.rank)), async_op=True).wait(host=True)
        there = cupy.machine.gpus[group.rank].bytes_at(found.data.ptr, found.nbytes)
        check_same(there.view(np.float32).copy(), floats(COUNT, 0) + floats(COUNT, 1), "what lies there")

    world(2, cupy, body)


def test_a_stream_that_never_comes_to_the_array_ends_in_the_deadline(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(floats(COUNT, 0))
        stuck = cupy.cuda.Stream(non_blocking=True)
        if group.rank == 0:
            stuck.fake.enqueue(lambda: False)
        expected = CollectiveTimeoutError if group.rank == 0 else GroupAbortedError
        with stuck, pytest.raises(expected, match="this rank's own GPU"):
            group.all_reduce(x, timeout=0.4 if group.rank == 0 else SECONDS)
        stuck.fake.tasks.clear()

    world(2, cupy, body)


@pytest.mark.parametrize("held", ["down 0", "up 0", "down 1"])
def test_a_peer_that_dies_in_mid_operation_leaves_nothing_behind(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Neither slots nor memory of the GPU, whether it is still at copies to the host, to the device, or at none."""
    events = Events(cupy, monkeypatch)
    blocks: list[int] = []

    def body(group: ProcessGroup) -> None:
        memory = cupy.machine.gpus[0].memory
        x = cupy.asarray(floats(COUNT, group.rank))
        cupy.cuda.get_current_stream().synchronize()
        group.barrier()
        if group.rank == 0:
            cupy.machine.settle()
            blocks.append(memory.live_blocks - 1)
            events.clear({"down 1": (CHUNKS - 1, "released"), held: (5, "released")})
        group.barrier()
        if group.rank == 1:
            group.all_reduce(x, async_op=True)
            events.wait_until_put_off(held)
            return group.session.leave("ValueError: bad batch")
        out = cupy.asarray(floats(COUNT, 1))
        cause = ""
        try:  # not pytest.raises, which refers to what it caught in a circle
            group.all_reduce(x, out=out)
        except PeerLostError as error:
            cause = error.message
        assert "bad batch" in cause
        del x, out
        events.clear({})
        parker, until = SYSTEM_CLOCK.parker(), SYSTEM_CLOCK.now() + SECONDS
        while memory.live_blocks > blocks[0] and SYSTEM_CLOCK.now() < until:  # a thread that brought news may just be leaving
            parker.park(SYSTEM_CLOCK.now() + 0.01)
            staging(cupy, 0).to_host(cupy.asarray(floats(8, 0)))  # what the GPU still read is let go of by the next copy
            cupy.machine.settle()
        blocks.append(memory.live_blocks)
        return None

    world(2, cupy, body)
    assert blocks[1] == blocks[0]
    assert cupy.machine.pinned.live_blocks <= 2 * SLOTS * 2


def test_shared_memory_overlaps_too(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither GPU gives its last chunk before a sum went up to the other."""
    events = Events(cupy, monkeypatch)
    events.clear({"down 0": (CHUNKS - 1, "up 1"), "down 1": (CHUNKS - 1, "up 0")})
    call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (COUNT,)),), ReduceOp.SUM)
    total = floats(COUNT, 0) + floats(COUNT, 1)
    with SharedWorld(2) as ranks:
        executions, outs = [], []
        for rank, arena in enumerate(ranks.arenas):
            with cupy.cuda.Device(rank):
                x = cupy.asarray(floats(COUNT, rank))
                outs.append(cupy.asarray(np.zeros(COUNT, np.float32)) if rank else x)
                prepared = prepare(arena, call)
                assert isinstance(prepared, TwoShot)
                guard = Guard(SYSTEM_CLOCK, Latch(), SECONDS)
                executions.append(prepared.start(Key(0, 0, 1), [x], [outs[rank]], guard))
        left = list(executions)
        until = SYSTEM_CLOCK.now() + SECONDS
        while left and SYSTEM_CLOCK.now() < until:
            left = [execution for execution in left if not execution.advance()]
        assert not left
        for rank, execution in enumerate(executions):
            with cupy.cuda.Device(rank):
                execution.make_stream_wait()
                assert execution.results[0] is outs[rank]
                same(cupy, outs[rank], total, f"rank {rank}")
            execution.finish()
