"""The contract of data movement collectives: results are the inputs bit for bit, in rank order, for any dtype and shape."""

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
from ferrorpc.testing.reference import check_list, check_same, every_dtype, values
from ferrorpc.types import DType


def _uneven(dtype: DType, source: int, target: int) -> Array:
    """What `source` sends to `target`. Pairs have different shapes; some arrays are empty, some have no dimension. Floats
    have a negative zero and a NaN."""
    shapes: list[tuple[int, ...]] = [(source, target), (target + 1,), (2, source, 1), ()]
    sent = values(dtype, shapes[(source + target) % 4], source, salt=target)
    if dtype.is_float or dtype.is_complex:
        flat = sent.reshape(-1)
        flat[:1], flat[1:2] = -0.0, np.nan
    return sent


class DataMovementContract(Contract):
    """broadcast, gather, scatter, all_gather, all_to_all, barrier."""

    @on_every_size
    @on_every_rank
    def test_broadcast_of_every_dtype_from_every_root(self, group: ProcessGroup, size: int) -> None:
        for dtype in every_dtype():
            for root in range(size):
                expected = _uneven(dtype, root, 2)
                check_same(group.broadcast(expected if group.rank == root else None, root=root), expected, dtype.label)

    @on_every_size
    @on_every_rank
    def test_gather_and_scatter_of_every_dtype_with_different_shapes(self, group: ProcessGroup, size: int) -> None:
        me = group.rank
        for item, dtype in enumerate(every_dtype()):
            root = item % size
            gathered = group.gather(_uneven(dtype, me, 1), root=root)
            if me == root:
                check_list(gathered, [_uneven(dtype, rank, 1) for rank in range(size)], f"gather of {dtype.label}")
            elif gathered is not None:
                raise AssertionError(f"rank {me} is not the root, but got {gathered!r}")
            parts = [_uneven(dtype, root, rank) for rank in range(size)] if me == root else None
            check_same(group.scatter(parts, root=root), _uneven(dtype, root, me), f"scatter of {dtype.label}")

    @on_every_size
    @on_every_rank
    def test_all_gather_and_all_to_all_of_every_dtype_with_different_shapes(self, group: ProcessGroup, size: int) -> None:
        me = group.rank
        for dtype in every_dtype():
            found = group.all_gather(_uneven(dtype, me, 3))
            check_list(found, [_uneven(dtype, rank, 3) for rank in range(size)], f"all_gather of {dtype.label}")
            found = group.all_to_all([_uneven(dtype, me, rank) for rank in range(size)])
            check_list(found, [_uneven(dtype, rank, me) for rank in range(size)], f"all_to_all of {dtype.label}")

    @on_every_size
    @on_every_rank
    def test_an_array_that_no_frame_can_describe_is_refused_and_the_group_stays_open(
        self, group: ProcessGroup, size: int
    ) -> None:
        too_large = [np.ones((0, 1 << 40))]
        if not np.__version__.startswith("1."):  # NumPy 1 cannot make this one
            too_large.append(np.ones((1,) * 33))
        for x in too_large:
            calls: list[tuple[Callable[..., object], object]]
            calls = [(group.all_reduce, x), (group.all_gather, x), (group.all_to_all, [x] * size)]
            for call, argument in calls:
                with pytest.raises(UsageError, match="dimensions"):
                    call(argument)
            if size > 1:
                with pytest.raises(UsageError, match="dimensions"):
                    group.send(x, (group.rank + 1) % size)
        x = np.ones((1,) * 32)
        check_list(group.all_gather(x), [x] * size, "32 dimensions")

    @on_every_size
    @on_every_rank
    def test_one_array_is_split_along_its_first_axis(self, group: ProcessGroup, size: int) -> None:
        everyones = [values(FLOAT, (10, 2), rank) for rank in range(size)]
        found = group.all_to_all(everyones[group.rank])
        check_list(found, [np.array_split(x, size)[group.rank] for x in everyones], "all_to_all")
        part = group.scatter(everyones[0] if group.rank == 0 else None)
        check_same(part, np.array_split(everyones[0], size)[group.rank], "scatter")

    @on_some_sizes
    @on_every_rank
    def test_moves_of_five_megabytes_and_of_strided_memory(self, group: ProcessGroup, size: int) -> None:
        big = values(FLOAT, FIVE_MEGABYTES, 5)
        check_same(group.broadcast(big if group.rank == 1 else None, root=1), big, "broadcast")
        everyones = [values(FLOAT, (1000, 700), rank)[::2, ::3] for rank in range(size)]
        check_list(group.all_gather(everyones[group.rank]), [x.copy() for x in everyones], "all_gather")
        large = [values(FLOAT, FIVE_MEGABYTES, rank) for rank in range(size)]
        found = group.all_to_all([large[group.rank]] * size)
        check_list(found, large, "all_to_all")

    @on_some_sizes
    @on_every_rank
    def test_five_megabytes_for_each_rank_are_exchanged_in_place(self, group: ProcessGroup, size: int) -> None:
        # More than is sent without credit: what arrives must not be written over what has not been sent yet.
        mine = [np.full(FIVE_MEGABYTES, 10 * group.rank + peer, np.float32) for peer in range(size)]
        wanted = [np.full(FIVE_MEGABYTES, 10 * peer + group.rank, np.float32) for peer in range(size)]
        whole = np.concatenate(mine)
        group.all_to_all(whole, out=whole)
        check_same(whole, np.concatenate(wanted), "all_to_all of one array")
        group.all_to_all(mine, out=mine)
        check_list(mine, wanted, "all_to_all of a list")

    @on_every_size
    @on_every_rank
    def test_out_may_be_one_array_a_list_or_one_array_to_split(self, group: ProcessGroup, size: int) -> None:
        me, everyones = group.rank, [values(FLOAT, (2, 3), rank) for rank in range(size)]
        strided = np.zeros((4, 3), np.float32)[1::2]
        check(group.broadcast(everyones[me] if me == 0 else None, out=strided) is strided, "broadcast did not return out")
        check_same(strided.copy(), everyones[0], "broadcast")
        places = [np.zeros((2, 3), np.float32) for _ in range(size)]
        check(group.all_gather(everyones[me], out=places) is places, "all_gather did not return out")
        check_list(places, everyones, "all_gather")
        whole = np.zeros((2 * size, 3), np.float32)
        group.all_gather(everyones[me], out=whole)
        check_same(whole, np.concatenate(everyones), "all_gather into one array")
        group.gather(everyones[me], root=0, out=whole[:, ::-1] if me == 0 else None)
        check_same(whole, np.concatenate(everyones)[:, :: -1 if me == 0 else 1].copy(), "gather")
        mine = np.zeros((2, 3), np.float32)
        group.scatter(everyones if me == 0 else None, out=mine)
        check_same(mine, everyones[me], "scatter")

    @on_every_size
    @on_every_rank
    def test_all_to_all_and_all_gather_work_in_place(self, group: ProcessGroup, size: int) -> None:
        me = group.rank
        parts = [values(FLOAT, 5, me, salt=rank) for rank in range(size)]
        group.all_to_all(parts, out=parts)
        check_list(parts, [values(FLOAT, 5, rank, salt=me) for rank in range(size)], "a list")
        whole = np.concatenate([values(FLOAT, 5, me, salt=rank) for rank in range(size)])
        group.all_to_all(whole, out=whole)
        check_same(whole, np.concatenate([values(FLOAT, 5, rank, salt=me) for rank in range(size)]), "one array")
        places = [values(FLOAT, 5, me) for _ in range(size)]
        group.all_gather(places[(me + 1) % size], out=places)
        check_list(places, [values(FLOAT, 5, rank) for rank in range(size)], "all_gather")

    @on_every_size
    @on_every_rank
    def test_results_own_their_memory(self, group: ProcessGroup, size: int) -> None:
        mine = values(FLOAT, 6, group.rank)
        before = mine.copy()
        results = [group.broadcast(mine, root=0), *group.all_gather(mine), *group.all_to_all([mine] * size)]
        results.append(group.scatter([mine] * size))
        for result in results:
            result[...] = -1
            check(not np.shares_memory(result, mine), "a result shares memory with the input")
        check_same(mine, before, "the input")

    @on_every_size
    @on_every_rank
    def test_a_wrong_argument_is_refused_and_the_group_stays_open(self, group: ProcessGroup, size: int) -> None:
        with pytest.raises(UsageError, match="root"):
            group.broadcast(1.0, root=size)
        with pytest.raises(UsageError, match="root"):
            group.gather(1.0, root=-1)
        with pytest.raises(TensorMismatchError, match="parts"):
            group.all_to_all([1.0] * (size + 1))
        with pytest.raises(TensorMismatchError, match="cannot be split"):
            group.all_to_all(3.0)  # type: ignore[call-overload]
        if size > 1:
            with pytest.raises(TensorMismatchError, match="different dtypes"):
                group.all_to_all([np.ones(1), *[np.ones(1, np.float32)] * (size - 1)])
        with pytest.raises(TensorMismatchError, match="arrays for"):
            group.all_gather(1.0, out=[np.zeros(())] * (size + 1))
        if group.size > 1:
            with pytest.raises(TensorMismatchError, match="one array several times"):
                group.all_gather(np.zeros(3), out=[np.zeros(3)] * group.size)
        with pytest.raises(UsageError):
            group.all_gather("text")  # type: ignore[call-overload]
        with pytest.raises(TensorMismatchError, match="object"):
            group.broadcast(np.array([None]), root=group.rank)
        check_list(group.all_gather(group.rank), [np.array(rank) for rank in range(size)], "afterwards")

    @on_every_size
    def test_no_rank_leaves_a_barrier_before_the_last_has_come(self, size: int) -> None:
        # Neither the group's nor the backend's own.
        arrived: list[int] = []

        def body(group: ProcessGroup) -> list[int]:
            totals = []
            for barrier in (group.barrier, group._backend.barrier) * 3:
                arrived.append(group.rank)
                barrier()
                totals.append(len(arrived))
                barrier()
            return totals

        check(self.world(size, body) == [[count * size for count in range(1, 7)]] * size, "a rank left a barrier early")
