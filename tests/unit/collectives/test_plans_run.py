"""Every algorithm that reduces, and barriers, run with numbers: the simulated world against NumPy in one process."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from ferrorpc.collectives.algorithms.catalogue import CATALOGUE, algorithms_of
from ferrorpc.collectives.algorithms.hierarchical import Layout
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.testing.reference import worst_rounding
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.codecs import CODEC_NAMES
from tests.unit.collectives.world import run

REDUCTIONS = [
    (operation, entry.name, entry.order.is_canonical)
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
    for entry in CATALOGUE[operation]
]


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


@pytest.mark.parametrize("wire", CODEC_NAMES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_compressed_all_reduce_leaves_the_same_bits_everywhere_and_rounds_twice_at_most(wire, size):
    rng = np.random.default_rng(3)
    inputs = [[rng.uniform(-1, 1, 1000).astype(np.float32)] for _ in range(size)]
    calls = [Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (1000,)),), ReduceOp.SUM, wire=wire)] * size
    results = run(calls, inputs)
    exact = np.sum([array[0].astype(np.float64) for array in inputs], axis=0)
    # Each input is rounded once, and the sum once, which may have come to a larger one by then.
    worst_inputs = worst_rounding(wire, [array for (array,) in inputs])
    bound = (size - 1) * worst_inputs + 1.05 * worst_rounding(wire, [exact.astype(np.float32)])
    for result in results:
        assert result[0].tobytes() == results[0][0].tobytes()
        assert np.abs(result[0] - exact).max() <= bound


@pytest.mark.parametrize("name", ["direct", "dissemination"])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_barriers_end(name, size):
    assert run([Call(Operation.BARRIER, algorithm=name)] * size, [[]] * size) == [[]] * size


@pytest.mark.parametrize("hosts", ["aabb", "abcab"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16], ids=lambda d: d.label)
def test_hierarchical_all_reduce_folds_hosts_and_then_what_they_have(hosts, dtype):
    (entry,) = set(algorithms_of(Operation.ALL_REDUCE, hosts)) - set(CATALOGUE[Operation.ALL_REDUCE])
    rng = np.random.default_rng(5)
    for count in (0, 1, 1000):
        inputs = [[(rng.standard_normal(count) * 40).astype(dtype.storage)] for _ in hosts]
        call = Call(Operation.ALL_REDUCE, (TensorSpec(dtype, (count,)),), ReduceOp.MEAN)
        results = run([call] * len(hosts), inputs, build=entry.build)
        folded = [reduce(np.add, [inputs[rank][0].astype(np.float32) for rank in ranks]) for ranks in Layout(hosts).members]
        expected = (reduce(np.add, folded) / np.float32(len(hosts))).astype(dtype.storage)
        for result in results:
            assert result[0].tobytes() == expected.tobytes()
