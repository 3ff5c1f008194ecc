"""Every operation of the face on GPU arrays, checked against NumPy in one process; whoever performs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ferrorpc.group import ProcessGroup

Array = np.ndarray[Any, Any]


def whole(shape: tuple[int, ...], rank: int, salt: int = 0) -> Array:
    """Whole numbers as float32: their sums are exact in any order."""
    return np.random.default_rng([rank, salt]).integers(-99, 99, shape).astype(np.float32)


def every_operation(group: ProcessGroup, cupy: Any, gpu: int | None = None) -> None:
    """Calls them all on this rank's own GPU, or on `gpu`, and on a stream of its own.

    Raises AssertionError where a result is not what it must be.
    """
    with cupy.cuda.Device(group.rank if gpu is None else gpu), cupy.cuda.Stream(non_blocking=True):
        _reductions(group, cupy)
        _moves(group, cupy)
        _pairs(group, cupy)
        _asynchronous(group, cupy)
        group.synchronize()
        group.barrier()


def same(cupy: Any, found: Any, expected: Array, what: str) -> None:
    """Whether `found` is a GPU array on the current device with these values."""
    assert isinstance(found, cupy.ndarray), f"{what} gave a {type(found).__name__}"
    assert found.device.id == cupy.cuda.Device().id, what
    np.testing.assert_array_equal(cupy.asnumpy(found), expected, err_msg=what)


def _reductions(group: ProcessGroup, cupy: Any) -> None:
    me, size = group.rank, group.size
    everyones = [whole((7, 3), rank) for rank in range(size)]
    total = sum(everyones[1:], everyones[0])
    x = cupy.asarray(everyones[me])
    same(cupy, group.all_reduce(x), total, "all_reduce")
    same(cupy, group.all_reduce(x, op="max"), np.max(everyones, axis=0), "all_reduce max")
    same(cupy, group.all_reduce(x * 2 + 1), 2 * total + size, "all_reduce of what is still being computed")
    same(cupy, x, everyones[me], "the input")
    found = group.reduce(x, root=size - 1)
    if me == size - 1:
        same(cupy, found, total, "reduce")
    else:
        assert found is None
    same(cupy, group.reduce_scatter(x), np.array_split(total, size)[me], "reduce_scatter")
    parts = [whole((rank + 1,), me, rank) for rank in range(size)]
    mine = sum((whole((me + 1,), rank, me) for rank in range(1, size)), whole((me + 1,), 0, me))
    same(cupy, group.reduce_scatter([cupy.asarray(part) for part in parts]), mine, "reduce_scatter of uneven parts")
    strided = cupy.asarray(np.zeros((14, 3), np.float32))[::2]
    assert group.all_reduce(x, out=strided) is strided
    same(cupy, strided.copy(), total, "all_reduce into strided memory")
    assert group.all_reduce(x, out=x) is x
    same(cupy, x, total, "all_reduce in place")


def _moves(group: ProcessGroup, cupy: Any) -> None:
    me, size = group.rank, group.size
    shapes = [(rank + 1, 2) for rank in range(size)]
    everyones = [whole(shape, rank) for rank, shape in enumerate(shapes)]
    x = cupy.asarray(everyones[me])
    root = size - 1
    same(cupy, group.broadcast(x, root=root), everyones[root], "broadcast")
    place = cupy.asarray(np.zeros(shapes[root], np.float32))
    assert group.broadcast(x if me == root else None, root=root, out=place) is place
    same(cupy, place, everyones[root], "broadcast into out")
    without = group.broadcast(x if me == root else None, root=root)
    if me != root:
        assert type(without) is np.ndarray
        np.testing.assert_array_equal(without, everyones[root])
    for rank, found in enumerate(group.all_gather(x)):
        same(cupy, found, everyones[rank], f"all_gather, item {rank}")
    even = [whole((3, 2), rank, 9) for rank in range(size)]
    joined = cupy.asarray(np.zeros((3 * size, 2), np.float32))
    assert group.all_gather(cupy.asarray(even[me]), out=joined) is joined
    same(cupy, joined, np.concatenate(even), "all_gather into one array")
    for rank, found in enumerate(group.gather(x, root=0) or []):
        same(cupy, found, everyones[rank], f"gather, item {rank}")
    parts = [cupy.asarray(part) for part in everyones] if me == root else cupy.asarray(np.zeros(1, np.float32))
    same(cupy, group.scatter(parts, root=root), everyones[me], "scatter")
    given = [whole((me + rank,), me, rank) for rank in range(size)]
    for rank, found in enumerate(group.all_to_all([cupy.asarray(part) for part in given])):
        same(cupy, found, whole((me + rank,), rank, me), f"all_to_all, item {rank}")


def _pairs(group: ProcessGroup, cupy: Any) -> None:
    me, size = group.rank, group.size
    if size == 1:
        return
    group.send(cupy.asarray(whole((5,), me)), (me + 1) % size, tag=3)
    before = (me - 1) % size
    out = cupy.asarray(np.zeros(5, np.float32))
    assert group.recv(before, tag=3, out=out) is out
    same(cupy, out, whole((5,), before), "recv")


def _asynchronous(group: ProcessGroup, cupy: Any) -> None:
    me, size = group.rank, group.size
    works = []
    for item in range(5):
        x = cupy.asarray(whole((100,), me, item))
        works.append(group.all_reduce(x * 2, async_op=True))
        works.append(group.all_gather(x, async_op=True))
        del x
    for item in reversed(range(5)):
        everyones = [whole((100,), rank, item) for rank in range(size)]
        for rank, found in enumerate(works[2 * item + 1].wait()):
            same(cupy, found, everyones[rank], "all_gather in flight")
        same(cupy, works[2 * item].wait(), 2 * sum(everyones[1:], everyones[0]), "all_reduce in flight")
