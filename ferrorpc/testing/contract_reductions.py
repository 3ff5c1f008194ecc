"""The contract of reductions: bit for bit the left fold in rank order, for any dtype, operator, size and layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.contract_base import (
    FIVE_MEGABYTES,
    FLOAT,
    Array,
    Contract,
    check,
    on_every_rank,
    on_every_size,
    on_some_sizes,
)
from ferrorpc.testing.reference import check_same, every_dtype, reduced, values, worst_rounding
from ferrorpc.types import DType, ReduceOp
from ferrorpc.wire.codecs import CODEC_NAMES


def _parts(dtype: DType, rank: int, size: int) -> list[Array]:
    """The input of `rank` for a reduce_scatter: parts of different lengths, one of them empty."""
    return [values(dtype, 3 * place, rank, salt=place) for place in range(size)]


class ReductionContract(Contract):
    """all_reduce, reduce and reduce_scatter."""

    def _dtypes(self) -> list[DType]:
        return [dtype for dtype in every_dtype() if ReduceOp.SUM in self.operators(dtype)]

    @on_every_size
    @on_every_rank
    def test_all_reduce_of_every_dtype_and_operator_is_the_left_fold(self, group: ProcessGroup, size: int) -> None:
        for dtype in self._dtypes():
            for op in self.operators(dtype):
                everyones = [values(dtype, 13, rank) for rank in range(size)]
                found = group.all_reduce(everyones[group.rank], op=op)
                self.check_sum(found, reduced(everyones, op, dtype), f"{op.value} of {dtype.label}")

    @on_every_size
    @on_every_rank
    def test_reduce_to_every_root_leaves_the_others_without_a_result(self, group: ProcessGroup, size: int) -> None:
        for item, dtype in enumerate(self._dtypes()):
            root = item % size
            everyones = [values(dtype, (3, 5), rank) for rank in range(size)]
            found = group.reduce(everyones[group.rank], root=root)
            if group.rank == root:
                self.check_sum(found, reduced(everyones, ReduceOp.SUM, dtype), f"{dtype.label} at root {root}")
            elif found is not None:
                raise AssertionError(f"rank {group.rank} is not the root, but got {found!r}")

    @on_every_size
    @on_every_rank
    def test_reduce_scatter_of_uneven_parts_gives_each_rank_its_own(self, group: ProcessGroup, size: int) -> None:
        for dtype in self._dtypes():
            op = self.operators(dtype)[int(dtype) % len(self.operators(dtype))]
            found = group.reduce_scatter(_parts(dtype, group.rank, size), op=op)
            mine = [values(dtype, 3 * group.rank, rank, salt=group.rank) for rank in range(size)]
            self.check_sum(found, reduced(mine, op, dtype), f"{op.value} of {dtype.label}")

    @on_every_size
    @on_every_rank
    def test_reduce_scatter_splits_an_array_as_array_split_does(self, group: ProcessGroup, size: int) -> None:
        everyones = [values(FLOAT, (11, 3), rank) for rank in range(size)]
        total = reduced(everyones, ReduceOp.SUM, FLOAT)
        self.check_sum(group.reduce_scatter(everyones[group.rank]), np.array_split(total, size)[group.rank])

    @on_every_size
    @pytest.mark.parametrize("count", [0, 1, 7, 1025])
    @on_every_rank
    def test_reductions_of_any_length(self, group: ProcessGroup, size: int, count: int) -> None:
        for dtype in (FLOAT, DType.FLOAT16, DType.INT64):
            everyones = [values(dtype, count, rank) for rank in range(size)]
            total = reduced(everyones, ReduceOp.SUM, dtype)
            self.check_sum(group.all_reduce(everyones[group.rank]), total, "all_reduce")
            self.check_sum(group.reduce_scatter(everyones[group.rank]), np.array_split(total, size)[group.rank], "scattered")
            at_root = group.reduce(everyones[group.rank], root=size - 1)
            if at_root is not None:
                self.check_sum(at_root, total, "reduce")

    @on_some_sizes
    @on_every_rank
    def test_reductions_of_five_megabytes(self, group: ProcessGroup, size: int) -> None:
        everyones = [values(FLOAT, FIVE_MEGABYTES, rank) for rank in range(size)]
        total = reduced(everyones, ReduceOp.MEAN, FLOAT)
        self.check_sum(group.all_reduce(everyones[group.rank], op="mean"), total, "all_reduce")
        scattered = group.reduce_scatter(everyones[group.rank], op="mean")
        self.check_sum(scattered, np.array_split(total, size)[group.rank], "reduce_scatter")

    @on_some_sizes
    @on_every_rank
    def test_inputs_may_lie_in_memory_as_they_like(self, group: ProcessGroup, size: int) -> None:
        layouts: list[Callable[[Array], Array]] = [
            lambda x: x[::2, 1:],
            lambda x: x.T,
            lambda x: x[::-1, ::-3],
            np.asfortranarray,
            lambda x: np.broadcast_to(x[0], (4, x.shape[1])),
            lambda x: x[:, :0],
        ]
        for item, layout in enumerate(layouts):
            everyones = [layout(values(FLOAT, (8, 9), rank, salt=item)) for rank in range(size)]
            mine = everyones[group.rank]
            mine.flags.writeable = False
            self.check_sum(group.all_reduce(mine), reduced(everyones, ReduceOp.SUM, FLOAT), f"layout {item}")

    @on_every_size
    @on_every_rank
    def test_numbers_count_as_arrays_of_no_dimension(self, group: ProcessGroup, size: int) -> None:
        check_same(group.all_reduce(group.rank + 1), np.array(size * (size + 1) // 2), "an integer")
        check_same(group.all_reduce(np.float32(0.5), op="max"), np.array(0.5, np.float32), "a NumPy scalar")
        check_same(group.all_reduce(True, op="band"), np.array(True), "a bool")

    @on_every_size
    @on_every_rank
    def test_a_result_is_writable_owns_its_memory_and_leaves_the_input_alone(self, group: ProcessGroup, size: int) -> None:
        mine = values(FLOAT, (4, 5), group.rank)
        before = mine.copy()
        results = [group.all_reduce(mine), group.reduce_scatter([mine] * size), group.reduce(mine, root=group.size - 1)]
        for result in results:
            if result is not None:
                result[...] = 7
                check(not np.shares_memory(result, mine), "a result shares memory with the input")
        check_same(mine, before, "the input")

    @on_every_size
    @on_every_rank
    def test_out_takes_the_result_in_place_or_strided_and_is_returned(self, group: ProcessGroup, size: int) -> None:
        everyones = [values(FLOAT, (6, 4), rank) for rank in range(size)]
        total = reduced(everyones, ReduceOp.SUM, FLOAT)
        in_place = everyones[group.rank].copy()
        strided = np.zeros((12, 4), np.float32)[::2]
        for x, out in ((in_place, in_place), (everyones[group.rank], strided), (strided, strided)):
            if out is x and x is strided:
                strided[...] = everyones[group.rank]
            check(group.all_reduce(x, out=out) is out, "the result is not out")
            self.check_sum(np.ascontiguousarray(out), total, "all_reduce")
        part = np.empty((np.array_split(total, size)[group.rank]).shape, np.float32)
        group.reduce_scatter(everyones[group.rank], out=part)
        self.check_sum(part, np.array_split(total, size)[group.rank], "reduce_scatter")
        untouched = np.full((6, 4), -1, np.float32)
        group.reduce(everyones[group.rank], root=0, out=untouched)
        self.check_sum(untouched, total if group.rank == 0 else np.full((6, 4), -1, np.float32), "reduce")

    @on_every_size
    @on_every_rank
    def test_a_wrong_out_or_operator_is_refused_and_the_group_stays_open(self, group: ProcessGroup, size: int) -> None:
        x = np.ones(6, np.float32)
        frozen = np.ones(6, np.float32)
        frozen.flags.writeable = False
        for out in (np.ones(5, np.float32), np.ones(6), frozen, np.broadcast_to(np.float32(1), (6,))):
            with pytest.raises(TensorMismatchError):
                group.all_reduce(x, out=out)
        with pytest.raises(UsageError, match="overlaps"):
            group.all_reduce(x[:4], out=x[1:5])
        with pytest.raises(UsageError, match="mean"):
            group.all_reduce(np.arange(3), op="mean")
        with pytest.raises(UsageError, match="order"):
            group.all_reduce(np.ones(3, np.complex64), op="max")
        with pytest.raises(UsageError, match="bits"):
            group.all_reduce(x, op="bxor")
        with pytest.raises(UsageError, match="average"):
            group.all_reduce(x, op="average")
        with pytest.raises(TensorMismatchError, match="float32"):
            group.all_reduce(np.ones(3, ">f4"))
        check_same(group.all_reduce(x), np.full(6, size, np.float32), "afterwards")

    @on_some_sizes
    @pytest.mark.parametrize("wire", CODEC_NAMES)
    def test_compressed_sums_are_close_and_the_same_on_every_rank(self, size: int, wire: str) -> None:
        def body(group: ProcessGroup) -> bytes:
            everyones = [values(FLOAT, 3000, rank) for rank in range(size)]
            found: Array = group.all_reduce(everyones[group.rank], wire=wire)
            exact = reduced(everyones, ReduceOp.SUM, FLOAT)
            worst = float(np.abs(found - exact).max())
            check(0 < worst < 2 * size * worst_rounding(wire, [*everyones, exact]), f"wire={wire} is off by {worst}")
            return found.tobytes()

        check(len(set(self.world(size, body))) == 1, "ranks hold different bits")

    @on_some_sizes
    @pytest.mark.parametrize("algorithm", ["direct", "ring", "recursive_doubling"])
    @on_every_rank
    def test_algorithms_by_name_agree_on_whole_numbers(self, group: ProcessGroup, size: int, algorithm: str) -> None:
        everyones = [values(DType.INT32, 41, rank) for rank in range(size)]
        found = group.all_reduce(everyones[group.rank], algorithm=algorithm)
        self.check_sum(found, reduced(everyones, ReduceOp.SUM, DType.INT32), algorithm)
