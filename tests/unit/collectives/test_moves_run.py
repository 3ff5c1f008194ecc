"""Every algorithm that only moves arrays, run in the simulated world: bits, shapes, and what is announced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import numpy as np
import pytest

from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.algorithms.catalogue import CATALOGUE
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.prepared import prepare
from ferrorpc.errors import CollectiveMismatchError, CollectiveTimeoutError, TensorMismatchError
from ferrorpc.guard import Guard
from ferrorpc.testing import FaultPlan, Pause, run_world
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.announcement import INLINE_BYTES
from ferrorpc.wire.frames import Key
from tests.unit.collectives.world import run


@pytest.mark.parametrize("name", [None, *(entry.name for entry in CATALOGUE[Operation.BROADCAST])])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_broadcast_moves_bits_and_shape(name, size):
    for root in {0, size - 1}:
        for shape in ((2, 3), (), (0, 4), (3, 11_003)):
            array = np.arange(np.prod(shape, dtype=int), dtype=np.uint16).reshape(shape)
            results = run(broadcasts(name, size, root, TensorSpec(DType.BFLOAT16, shape)), only_at(root, size, array))
            for result in results:
                assert np.array_equal(result[0], array)
                assert result[0].shape == shape
                assert result[0].flags.writeable
                assert result[0].base is None


def broadcasts(name: str | None, size: int, root: int, spec: TensorSpec) -> list[Call]:
    return [Call(Operation.BROADCAST, (spec,) if rank == root else (), root=root, algorithm=name) for rank in range(size)]


def only_at(root: int, size: int, array: np.ndarray) -> list[list[np.ndarray]]:
    return [[array] if rank == root else [] for rank in range(size)]


@pytest.mark.parametrize("count", [INLINE_BYTES // 4, INLINE_BYTES // 4 + 1])
def test_announced_arrays_go_into_given_memory(count):
    array = np.arange(count, dtype=np.float32)
    outputs = [[np.zeros(count, np.float32)] for _ in range(4)]
    spec = TensorSpec(DType.FLOAT32, (count,))
    results = run(broadcasts(None, 4, 1, spec), only_at(1, 4, array), outputs)
    for result, out in zip(results, outputs, strict=True):
        assert result[0] is out[0]
        assert np.array_equal(out[0], array)


@pytest.mark.parametrize("algorithm", [None, "direct"])
@pytest.mark.parametrize("count", [INLINE_BYTES // 4, INLINE_BYTES // 4 + 1])
@pytest.mark.parametrize(("given", "more"), [(np.float64, 0), (np.float32, 1)], ids=["dtype", "shape"])
def test_what_does_not_fit_is_not_written_to_what_was_given(algorithm, count, given, more):
    def body(group):
        out = np.zeros(count + more, given)
        if group.rank == 0:
            group.broadcast(np.ones(count, np.float32), algorithm=algorithm)
        else:
            with pytest.raises(TensorMismatchError, match="gave float32"):
                group.broadcast(out=out, algorithm=algorithm)
        group.barrier()
        return out.any()

    assert not any(run_world(3, body))


def test_a_root_that_is_late_is_named_before_its_array_is_known():
    def body(group):
        group.session.clock.parker().park(1.0)
        return group.broadcast(np.zeros(3) if group.rank == 0 else None, timeout=5.0)

    outcomes = run_world(3, body, faults=FaultPlan(pause={0: Pause(0.5, 100.0)}), return_exceptions=True)
    late = [each for each in outcomes if isinstance(each, CollectiveTimeoutError)]
    assert late
    assert all(each.waiting_on == [0] and "broadcast" in each.message and "rank 0" in each.message for each in late)


def test_a_prepared_broadcast_serves_arrays_of_any_size():
    """Off the root one prepared call is used for whatever arrives."""
    backends = SimulatedBackend.create_group(3)
    off_root = [backend.prepare(Call(Operation.BROADCAST, root=0)) for backend in backends[1:]]

    def body(rank: int, number: int, array: np.ndarray) -> list[np.ndarray]:
        backend = backends[rank]
        on_root = backend.prepare(Call(Operation.BROADCAST, (TensorSpec(DType.INT64, array.shape),), root=0))
        prepared = [on_root, *off_root][rank]
        guard = Guard(backend.clock, backend.latch, 20.0)
        return backend.run(prepared.start(Key(0, 0, number), [array] if rank == 0 else [], None, guard))

    for number, count in enumerate((3, 100_000, 3, 0, 100_001), 1):
        array = np.arange(count, dtype=np.int64)
        with ThreadPoolExecutor(3) as pool:
            for result in pool.map(body, range(3), [number] * 3, [array] * 3):
                assert np.array_equal(result[0], array)
    for backend in backends:
        backend.close()


def test_a_broadcast_of_ever_other_sizes_does_not_keep_what_it_prepared_for_each():
    alive = WeakSet()

    class Laid:
        pass

    def run_plan(call, plan):
        alive.add(laid := Laid())
        return laid

    announced = prepare(Call(Operation.BROADCAST, root=0), 1, 4, run_plan)
    for count in range(100_000, 100_500):
        known = announced.prepared_for(TensorSpec(DType.INT32, (count,)))
        assert announced.prepared_for(TensorSpec(DType.INT32, (count,))) is known
    assert len(alive) < 100


@pytest.mark.parametrize("name", ["direct", "ring"])
def test_all_gather_of_uneven_arrays(name):
    arrays = [np.full((rank, 2), rank, np.int32) for rank in range(5)]
    calls = [Call(Operation.ALL_GATHER, (TensorSpec(DType.INT32, a.shape),), algorithm=name) for a in arrays]
    for result in run(calls, [[a] for a in arrays]):
        for got, sent in zip(result, arrays, strict=True):
            assert np.array_equal(got, sent)
            assert got.shape == sent.shape


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_bundled_all_gather_of_arrays_of_one_shape(size, shape):
    arrays = [np.full(shape, rank, np.uint16) for rank in range(size)]
    calls = [Call(Operation.ALL_GATHER, (TensorSpec(DType.BFLOAT16, shape),), algorithm="bruck")] * size
    for result in run(calls, [[array] for array in arrays]):
        for got, sent in zip(result, arrays, strict=True):
            assert np.array_equal(got, sent)
            assert got.shape == shape


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE[Operation.ALL_TO_ALL]])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_to_all_brings_each_part_where_it_belongs(name, size):
    for shape in ((), (0,), (3, 5)):
        parts = [[np.full(shape, size * rank + peer, np.int16) for peer in range(size)] for rank in range(size)]
        calls = [Call(Operation.ALL_TO_ALL, (TensorSpec(DType.INT16, shape),) * size, algorithm=name)] * size
        for rank, result in enumerate(run(calls, parts)):
            for source, got in enumerate(result):
                assert np.array_equal(got, parts[source][rank])
                assert got.shape == shape


def test_bundled_arrays_of_different_shapes_are_a_mismatch_that_shows_them():
    calls = [Call(Operation.ALL_GATHER, (TensorSpec(DType.INT16, (count,)),), algorithm="bruck") for count in (2, 2, 3)]
    with pytest.raises(CollectiveMismatchError, match=r"int16\[3\]"):
        run(calls, [[np.zeros(call.inputs[0].shape, np.int16)] for call in calls])
