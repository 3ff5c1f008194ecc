"""The contract of groups: point-to-point messages, asynchronous operations, streams, subgroups, and the end of a group."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from ferrorpc.collectives.ranks_and_tags import TAG_MAX
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    InvalidRankError,
    SelfSendError,
    TensorMismatchError,
    UsageError,
)
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.contract_base import FLOAT, Contract, check, on_every_rank, on_every_size, on_some_sizes
from ferrorpc.testing.reference import check_list, check_same, every_dtype, reduced, values
from ferrorpc.types import DType, ReduceOp
from ferrorpc.work import Work

SHORT_SECONDS = 0.05
LONG_SECONDS = 3600.0
"""No test waits so long: what has this timeout has to end before."""
PATIENCE_SECONDS = 20.0


def _check_alone(call: Callable[[], object]) -> None:
    """Raises AssertionError unless a call raises a FerroError whose traceback shows no other exception."""
    with pytest.raises(FerroError) as raised:
        call()
    error = raised.value
    check(
        error.__cause__ is None and (error.__context__ is None or error.__suppress_context__),
        f"{error!r} is shown behind {error.__cause__ or error.__context__!r}",
    )


class PointToPointContract(Contract):
    """send and recv."""

    @on_some_sizes
    @on_every_rank
    def test_every_dtype_travels_round_the_ring(self, group: ProcessGroup, size: int) -> None:
        after, before = (group.rank + 1) % size, (group.rank - 1) % size
        for dtype in every_dtype():
            work = group.send(values(dtype, (2, 3), group.rank), after, async_op=True)
            found = group.recv(before)
            check_same(found, values(dtype, (2, 3), before), dtype.label)
            found[...] = 0
            work.wait()

    @on_some_sizes
    @on_every_rank
    def test_messages_keep_their_order_within_a_tag_and_share_memory_with_nothing(self, group: ProcessGroup, size: int) -> None:
        # The sender changes each array as soon as it may; the receiver keeps all. Tags differ in high bits only.
        tags = (0, 1 << 16, 1 << 32, TAG_MAX)
        works: list[Work[None]] = []
        if group.rank == 0:
            for item in range(2 * len(tags)):
                x = np.full(5, item)
                works.append(group.send(x, 1, tag=tags[item % len(tags)], async_op=True))
                with suppress(CollectiveTimeoutError):  # of a backend whose send waits for the peer
                    works[-1].wait(timeout=SHORT_SECONDS)
                    x[...] = -1
        group.barrier()
        if group.rank == 1:
            found = [group.recv(0, tag=tag) for tag in reversed(tags) for _ in range(2)]
            check_list(found, [np.full(5, item) for item in (3, 7, 2, 6, 1, 5, 0, 4)], "messages by tag")
        for work in works:
            work.wait()

    @on_some_sizes
    @on_every_rank
    def test_an_array_may_be_changed_once_send_has_returned(self, group: ProcessGroup, size: int) -> None:
        if group.rank == 0:
            x = np.zeros(5, np.int64)
            for item in range(4):
                x[...] = item
                group.send(x, 1)
            x[...] = -1
        elif group.rank == 1:
            found = [group.recv(0) for _ in range(4)]
            check_list(found, [np.full(5, item) for item in range(4)], "messages of one array")

    @on_some_sizes
    @on_every_rank
    def test_sizes_from_nothing_to_megabytes_into_out_of_any_layout(self, group: ProcessGroup, size: int) -> None:
        peer = group.rank ^ 1
        for count in (0, 1, 1001, 1_250_001):
            work = group.send(values(FLOAT, count, group.rank), peer, async_op=True)
            out = np.zeros((count, 2), np.float32)[:, 0]
            check(group.recv(peer, out=out) is out, "recv did not return out")
            check_same(out.copy(), values(FLOAT, count, peer), f"{count} elements")
            work.wait()

    @on_some_sizes
    @on_every_rank
    def test_a_message_that_does_not_fit_out_stays_for_the_next_recv(self, group: ProcessGroup, size: int) -> None:
        if group.rank == 1:
            for item in range(2):
                group.send(np.full(4, item, np.float32), 0)
        elif group.rank == 0:
            for out in (np.zeros(3, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32)):
                with pytest.raises(TensorMismatchError):
                    group.recv(1, out=out)
            for item in range(2):
                check_same(group.recv(1), np.full(4, item, np.float32), "after an out that did not fit")
        group.barrier()

    @on_some_sizes
    @on_every_rank
    def test_a_recv_that_times_out_loses_and_breaks_nothing(self, group: ProcessGroup, size: int) -> None:
        if group.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as raised:
                group.recv(1, timeout=SHORT_SECONDS)
            check(raised.value.waiting_on == [1], f"it says it waited on {raised.value.waiting_on}")
        group.barrier()
        if group.rank == 1:
            group.send(np.arange(3), 0)
        elif group.rank == 0:
            check_same(group.recv(1), np.arange(3), "after a timeout")
        group.barrier()

    @on_some_sizes
    @on_every_rank
    def test_a_message_that_comes_just_after_a_timeout_is_for_the_next_recv(self, group: ProcessGroup, size: int) -> None:
        for item in range(10):
            group.barrier()
            if group.rank == 1:
                group.send(np.array(item), 0)
            elif group.rank == 0:
                try:
                    found = group.recv(1, timeout=0.0)
                except CollectiveTimeoutError:  # as a rule
                    found = group.recv(1)
                check_same(found, np.array(item), "after a timeout")
        group.barrier()

    @on_every_size
    @on_every_rank
    def test_a_rank_cannot_send_to_itself_or_to_nobody(self, group: ProcessGroup, size: int) -> None:
        for call in (lambda peer: group.send(1.0, peer), group.recv):
            with pytest.raises(SelfSendError):
                call(group.rank)
            with pytest.raises(InvalidRankError):
                call(size)
        if size > 1:
            with pytest.raises(UsageError, match="tag"):
                group.send(1.0, (group.rank + 1) % size, tag=-1)
        group.barrier()


class AsyncContract(Contract):
    """Several operations in flight at the same time."""

    @on_every_size
    @on_every_rank
    def test_operations_may_be_in_flight_together_and_waited_for_in_any_order(self, group: ProcessGroup, size: int) -> None:
        count = 12
        works = [group.all_reduce(values(FLOAT, 50 + item, group.rank, salt=item), async_op=True) for item in range(count)]
        order = list(range(count))
        random.Random(group.rank).shuffle(order)
        for item in order:
            everyones = [values(FLOAT, 50 + item, rank, salt=item) for rank in range(size)]
            self.check_sum(works[item].wait(), reduced(everyones, ReduceOp.SUM, FLOAT), f"operation {item}")
            check(works[item].done() and works[item].exception() is None, f"{works[item]!r} was waited for")

    @on_some_sizes
    @on_every_rank
    def test_every_operation_can_be_asynchronous(self, group: ProcessGroup, size: int) -> None:
        mine, everyones = np.full(3, group.rank), [np.full(3, rank) for rank in range(size)]
        total = reduced(everyones, ReduceOp.SUM, DType.INT64)
        at_root = group.rank == 1
        works = {
            "reduce": (group.reduce(mine, root=1, async_op=True), total if at_root else None),
            "broadcast": (group.broadcast(mine if at_root else None, root=1, async_op=True), everyones[1]),
            "scatter": (group.scatter(everyones if at_root else None, root=1, async_op=True), mine),
            "reduce_scatter": (group.reduce_scatter([mine] * size, async_op=True), total),
        }
        lists = [group.all_gather(mine, async_op=True), group.all_to_all([mine] * size, async_op=True)]
        lists.append(group.gather(mine, root=1, async_op=True))
        meeting = group.barrier(async_op=True)
        for name, (work, expected) in works.items():
            found = work.wait()
            if expected is not None:
                check_same(found, expected, name)
        for work in lists[:2]:
            check_list(work.wait(), everyones, repr(work))
        if at_root:
            check_list(lists[2].wait(), everyones, "gather")
        meeting.wait()
        group.synchronize()

    @on_some_sizes
    @on_every_rank
    def test_a_wait_that_times_out_consumes_nothing(self, group: ProcessGroup, size: int) -> None:
        work = group.recv(1, async_op=True) if group.rank == 0 else None
        for _ in range(2):
            if work is not None:
                with pytest.raises(CollectiveTimeoutError):
                    work.wait(timeout=SHORT_SECONDS)
        group.barrier()
        if group.rank == 1:
            group.send(np.arange(4.0), 0)
        if work is not None:
            check_same(work.wait(), np.arange(4.0), "after two timeouts")
            check_same(work.wait(), np.arange(4.0), "once more")

    @on_every_size
    @on_every_rank
    def test_a_stream_is_numbered_by_meaning_not_by_order(self, group: ProcessGroup, size: int) -> None:
        streams = [group.stream(), group.stream()]
        calls = [(stream, number) for stream in (0, 1) for number in range(6)]
        random.Random(group.rank).shuffle(calls)
        works = {
            (stream, number): streams[stream].all_reduce(np.full(2, 10 * stream + number), number=number)
            for stream, number in calls
        }
        total = group.all_reduce(np.ones(1))
        for (stream, number), work in works.items():
            check_same(work.wait(), np.full(2, size * (10 * stream + number)), f"stream {stream}, number {number}")
        check_same(total, np.full(1, float(size)), "program order beside it")


class SubgroupContract(Contract):
    """Groups of some of a group's ranks."""

    @on_every_size
    @on_every_rank
    def test_subgroups_compute_apart_and_together(self, group: ProcessGroup, size: int) -> None:
        even, odd = list(range(0, size, 2)), list(range(1, size, 2))
        halves = [group.subgroup(ranks) for ranks in (even, odd) if ranks]
        mine = [half for half in halves if half is not None]
        ranks = even if group.rank % 2 == 0 else odd
        places = [(half.size, half.rank) for half in mine]
        check(places == [(len(ranks), ranks.index(group.rank))], f"rank {group.rank} is in {mine}")
        works = [mine[0].all_reduce(np.full(2, group.rank), async_op=True) for _ in range(3)]
        check_same(group.all_reduce(np.ones(1)), np.full(1, float(size)), "the world")
        for work in works:
            check_same(work.wait(), np.full(2, sum(ranks)), "the half")
        if mine[0].size > 1:
            peer = 1 - min(mine[0].rank, 1) if mine[0].rank < 2 else None
            if peer is not None:
                work = mine[0].send(np.array(group.rank), peer, async_op=True)
                check_same(mine[0].recv(peer), np.array(ranks[peer]), "a pair of the half")
                work.wait()
        mine[0].close()
        with pytest.raises(GroupClosedError):
            mine[0].barrier()
        group.barrier()

    @on_every_size
    @on_every_rank
    def test_the_order_given_is_the_order_of_ranks_also_in_a_subgroup_of_a_subgroup(
        self, group: ProcessGroup, size: int
    ) -> None:
        backwards = group.subgroup(list(reversed(range(size))))
        if backwards is None:
            raise AssertionError("every rank is in it")
        check_list(backwards.all_gather(group.rank), [np.array(rank) for rank in reversed(range(size))], "backwards")
        inner = backwards.subgroup([size - 1])
        check((inner is not None) == (group.rank == 0), "the innermost group is rank 0's")
        if inner is not None:
            check(inner.world_ranks == (0,), f"the innermost group has world ranks {inner.world_ranks}")
            check_same(inner.all_reduce(np.ones(2)), np.ones(2), "alone")
        group.barrier()

    def test_a_subgroup_takes_no_messages_of_its_world_whichever_begins_first(self) -> None:
        def body(group: ProcessGroup) -> None:
            pair, peer, token = group.subgroup([0, 1]), 1 - group.rank, np.ones(1)
            if pair is None:
                raise AssertionError("every rank is in it")

            def begun(of: ProcessGroup, factor: int) -> list[Work[Any]]:
                return [of.all_reduce(np.full(2, factor * (group.rank + 1)), async_op=True) for _ in range(4)]

            if group.rank == 0:
                works = begun(group, 1)
                group.send(token, peer)
                group.recv(peer)
                others = begun(pair, 10)
            else:
                group.recv(peer)
                others = begun(pair, 10)
                group.send(token, peer)
                works = begun(group, 1)
            for work, other in zip(works, others, strict=True):
                check_same(work.wait(), np.full(2, 3), "the world")
                check_same(other.wait(), np.full(2, 30), "the pair")

        self.world(2, body)

    @on_some_sizes
    @on_every_rank
    def test_a_subgroup_reduces_as_its_world_does(self, group: ProcessGroup, size: int) -> None:
        # Every dtype and operator, to the same bits, and apart from another subgroup of the same ranks.
        everyone, again = (group.subgroup(list(range(size))) for _ in range(2))
        if everyone is None or again is None:
            raise AssertionError("every rank is in it")
        works = [each.all_reduce(np.full(2, factor), async_op=True) for each, factor in ((everyone, 1), (again, 5))]
        for work, total in zip(works, (size, 5 * size), strict=True):
            check_same(work.wait(), np.full(2, total), "a subgroup beside another of the same ranks")
        for dtype in every_dtype():
            for op in self.operators(dtype):
                mine, what = values(dtype, 13, group.rank), f"{op.value} of {dtype.label}"
                check_same(everyone.all_reduce(mine, op=op), group.all_reduce(mine, op=op), what)

    @pytest.mark.parametrize("ended", ["world", "subgroup"])
    def test_a_subgroup_ends_with_its_world_and_the_world_with_its_subgroup(self, ended: str) -> None:
        def body(group: ProcessGroup) -> None:
            pair, peer = group.subgroup([0, 1]), 1 - group.rank
            if pair is None:
                raise AssertionError("every rank is in it")
            one, other = (group, pair) if ended == "world" else (pair, group)
            work = other.recv(peer, tag=1, async_op=True, timeout=LONG_SECONDS)
            with suppress(GroupAbortedError):  # the other rank may be faster
                group.barrier()
            one.abort("the loss is NaN")
            for call in (lambda: work.wait(timeout=PATIENCE_SECONDS), other.barrier):
                with pytest.raises(GroupAbortedError, match="the loss is NaN"):
                    call()

        self.world(2, body)


class LifecycleContract(Contract):
    """A group's attributes, the errors of wrong calls, and its end."""

    @on_some_sizes
    @on_every_rank
    def test_an_error_is_shown_without_others_that_only_led_to_it(self, group: ProcessGroup, size: int) -> None:
        x, rank = np.ones(4, np.float32), group.rank
        wrong: list[Callable[[], object]] = [
            lambda: group.all_reduce(x, "concatenate"),
            lambda: group.all_reduce(x, []),  # type: ignore[call-overload]
            lambda: group.all_reduce(x, out=np.ones(3)),
            lambda: group.all_reduce(x[:3], out=x[1:]),
            lambda: group.all_reduce(x, timeout=-1.0),
            lambda: group.all_reduce(np.array([object()])),
            lambda: group.reduce(x, root=size),
            lambda: group.reduce(x, root="all"),  # type: ignore[call-overload]
            lambda: group.broadcast(None, root=rank),
            lambda: group.gather(x, root=-1),
            lambda: group.scatter(None, root=rank),
            lambda: group.scatter([x] * (size + 1), root=rank),
            lambda: group.reduce_scatter([x] * (size + 1)),
            lambda: group.reduce_scatter([x] * size, "concatenate"),
            lambda: group.all_to_all(np.ones(())),
            lambda: group.send(x, rank),
            lambda: group.recv(size),
            lambda: group.send(x, (rank + 1) % size, tag=-1),
            lambda: group.recv((rank + 1) % size, tag=2, timeout=SHORT_SECONDS),
            lambda: group.subgroup([0, 0]),
            lambda: group.empty((2, -1), "float32"),
            lambda: group.empty(2, "float31"),
        ]
        for call in wrong:
            _check_alone(call)
        group.barrier()
        group.close()
        for call in (group.barrier, lambda: group.all_reduce(np.ones(5)), lambda: group.gather(x), group.stream):
            _check_alone(call)

    @on_some_sizes
    @on_every_rank
    def test_the_backends_own_barrier_waits_for_every_rank_or_its_timeout(self, group: ProcessGroup, size: int) -> None:
        group._backend.barrier(timeout=PATIENCE_SECONDS)
        with nullcontext() if group.rank == 0 else suppress(FerroError):
            group.gather(1.0)  # rank 0 knows that every rank is behind its first barrier
        if group.rank == 0:
            with pytest.raises(BarrierTimeoutError):
                group._backend.barrier(timeout=SHORT_SECONDS)
        with suppress(FerroError):  # the timeout may have ended the generation
            group.broadcast(1.0)

    @on_every_size
    def test_a_group_says_what_it_is_and_refuses_everything_after_close(self, size: int) -> None:
        def body(group: ProcessGroup) -> tuple[int, str, int]:
            check(group.size == size and group.world_ranks == tuple(range(size)), repr(group))
            memory = group.empty((3, 2), "int16")
            memory[...] = group.rank
            check_list(group.all_gather(memory), [np.full((3, 2), rank, np.int16) for rank in range(size)], "empty")
            check("float32" in group.explain("all_reduce", 4000), "explain does not say what it explains")
            check("barrier" in group.explain("barrier", 0), "explain does not say what it explains")
            group.close()
            group.close()
            group._backend.close()
            for call in (group.barrier, lambda: group.all_reduce(1.0), lambda: group.stream(), lambda: group.subgroup([0])):
                with pytest.raises(GroupClosedError):
                    call()
            return group.rank, group.backend, group.generation

        ranks, backends, generations = zip(*self.world(size, body), strict=True)
        check(
            ranks == tuple(range(size)) and len(set(backends)) == 1 and set(generations) == {1},
            f"ranks {ranks} of backends {backends} in generations {generations}",
        )

    def test_what_waits_ends_with_the_generation_and_raises_its_cause(self) -> None:
        def body(group: ProcessGroup) -> None:
            peer = 1 - group.rank
            works = [group.recv(peer, tag=1, async_op=True, timeout=LONG_SECONDS)]
            if group.rank == 0:
                works.append(group.all_reduce(np.ones(3), async_op=True, timeout=LONG_SECONDS))
            with suppress(GroupAbortedError):  # the other rank may be faster
                for sender in range(2):  # one after the other, for backends whose sends wait for their peer
                    if group.rank == sender:
                        group.send(np.ones(1), peer)
                    else:
                        group.recv(peer)
            group.abort("the loss is NaN")
            for work in works:
                with pytest.raises(GroupAbortedError, match="the loss is NaN"):
                    work.wait(timeout=PATIENCE_SECONDS)

        self.world(2, body)

    @on_some_sizes
    @on_every_rank
    def test_a_rank_that_ends_early_fails_nobody_who_does_not_need_it(self, group: ProcessGroup, size: int) -> None:
        group.barrier()
        last = group.reduce(np.ones(3), root=size - 1)
        if group.rank == size - 1:
            check_same(last, np.full(3, float(size)), "the last rank's")
