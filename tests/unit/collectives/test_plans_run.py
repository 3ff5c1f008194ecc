"""Every algorithm run with numbers: the simulated world against NumPy in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import numpy as np
import pytest

from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.algorithms.catalogue import CATALOGUE
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.guard import Guard
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key

REDUCTIONS = [
    (operation, entry.name, entry.rank_order)
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
    for entry in CATALOGUE[operation]
]


def run(calls: list[Call], inputs: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Each rank's results."""
    backends = SimulatedBackend.create_group(len(calls))

    def body(rank: int) -> list[np.ndarray]:
        backend = backends[rank]
        guard = Guard(backend.clock, backend.latch, 20.0)
        return backend.run(backend.prepare(calls[rank]).start(Key(0, 0, 1), inputs[rank], None, guard))

    with ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(body, range(len(calls))))
    for backend in backends:
        backend.close()
    return results


@pytest.mark.parametrize(("operation", "name", "rank_order"), REDUCTIONS, ids=[f"{o.value}-{n}" for o, n, _ in REDUCTIONS])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.INT8], ids=lambda d: d.label)
def test_reductions_are_the_left_fold_where_they_say_so_and_close_to_it_elsewhere(operation, name, rank_order, size, dtype):
    rng = np.random.default_rng(7)
    op = ReduceOp.SUM if dtype is DType.INT8 else ReduceOp.MEAN
    for count in (0, 1, 7, 1000):
        parts = size if operation is Operation.REDUCE_SCATTER else 1
        inputs = [[(rng.standard_normal(count) * 40).astype(dtype.storage) for _ in range(parts)] for _ in range(size)]
        specs = (TensorSpec(dtype, (count,)),) * parts
        root = size - 1 if operation is Operation.REDUCE else None
        results = run([Call(operation, specs, op, root, algorithm=name)] * size, inputs)
        for rank, result in enumerate(results):
            if operation is Operation.REDUCE and rank != root:
                assert result == []
                continue
            part = rank if parts > 1 else 0
            expected = fold([array[part] for array in inputs], op, dtype)
            if rank_order or dtype is DType.INT8:
                assert result[0].tobytes() == expected.tobytes()
            else:
                np.testing.assert_allclose(result[0], expected, rtol=1e-2 if dtype.is_half else 1e-5, atol=1e-3)
            if operation is Operation.ALL_REDUCE:
                assert result[0].tobytes() == results[0][0].tobytes()


def fold(arrays: list[np.ndarray], op: ReduceOp, dtype: DType) -> np.ndarray:
    wide = [array.astype(np.float32) for array in arrays] if dtype.is_half else arrays
    total = reduce(np.add, wide)
    return (total / total.dtype.type(len(arrays)) if op is ReduceOp.MEAN else total).astype(dtype.storage)


@pytest.mark.parametrize("wire", ["bf16", "f16", "int8"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_compressed_all_reduce_leaves_the_same_bits_everywhere_and_rounds_twice_at_most(wire, size):
    rng = np.random.default_rng(3)
    inputs = [[rng.uniform(-1, 1, 1000).astype(np.float32)] for _ in range(size)]
    calls = [Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (1000,)),), ReduceOp.SUM, wire=wire)] * size
    results = run(calls, inputs)
    exact = np.sum([array[0].astype(np.float64) for array in inputs], axis=0)
    # Each input is rounded once, and the sum once: half a step of its magnitude each.
    step = {"bf16": 2.0**-8, "f16": 2.0**-11, "int8": 0.5 / 127}[wire]
    bound = step * (size - 1) + step * np.abs(exact).max() * 1.05
    for result in results:
        assert result[0].tobytes() == results[0][0].tobytes()
        assert np.abs(result[0] - exact).max() <= bound


@pytest.mark.parametrize("name", ["tree", "direct"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_broadcast_moves_bits_and_shape(name, size):
    for root in {0, size - 1}:
        array = np.arange(6, dtype=np.uint16).reshape(2, 3)
        spec = TensorSpec(DType.BFLOAT16, (2, 3))
        calls = [Call(Operation.BROADCAST, (spec,) if rank == root else (), root=root, algorithm=name) for rank in range(size)]
        results = run(calls, [[array] if rank == root else [] for rank in range(size)])
        for result in results:
            assert np.array_equal(result[0], array)


@pytest.mark.parametrize("name", ["direct", "ring"])
def test_all_gather_of_uneven_arrays(name):
    arrays = [np.full((rank, 2), rank, np.int32) for rank in range(5)]
    calls = [Call(Operation.ALL_GATHER, (TensorSpec(DType.INT32, a.shape),), algorithm=name) for a in arrays]
    for result in run(calls, [[a] for a in arrays]):
        for got, sent in zip(result, arrays, strict=True):
            assert np.array_equal(got, sent)
            assert got.shape == sent.shape


@pytest.mark.parametrize("name", ["direct", "dissemination"])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_barriers_end(name, size):
    assert run([Call(Operation.BARRIER, algorithm=name)] * size, [[]] * size) == [[]] * size
