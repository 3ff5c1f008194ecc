"""`uneven` blocks: where the ranks that still take steps are refused one, those that have left go on following."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest

from ferrorpc import hooks
from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, PeerLostError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import run_world
from tests.interrupts import InterruptAt
from tests.unit.ddp.model import Plain

REFUSED = "the weights of all ranks sum to"


@pytest.mark.parametrize("hook", [None, hooks.Compress("int8")], ids=["plain", "int8"])
@pytest.mark.parametrize("dtypes", [["float32"], ["float16", "float64", "complex64"]], ids="-".join)
@pytest.mark.parametrize("bad", [0, 3e38])
def test_ranks_that_have_left_follow_after_a_step_that_was_refused(bad, dtypes, hook):
    """Its weights sum to zero, or in some dtype to infinity."""
    weights = [[2, bad, 3, bad], [1, bad, 3, bad], []]

    def body(group):
        sync = GradientSynchronizer({dtype: np.zeros(3, dtype) for dtype in dtypes}, group, hook=hook)
        found = []
        with sync.uneven(found.append):
            for number, weight in enumerate(weights[group.rank]):
                grads = {dtype: np.full(3, number + group.rank, dtype) for dtype in dtypes}
                with pytest.raises(UsageError, match=REFUSED) if weight == bad else nullcontext():
                    found.append(sync(grads, weight))
        group.barrier()
        return [[round(float(means[dtype][0].real), 2) for dtype in dtypes] for means in found]

    assert run_world(3, body) == [[[0.33] * len(dtypes), [2.5] * len(dtypes)]] * 3


def test_weights_are_compared_again_after_a_block_that_a_caught_exit_has_left():
    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group, check_every=1)
        with suppress(SystemExit), ddp.uneven():
            sys.exit(0)
        module["w"].data[0] = group.rank
        module["w"].grad = np.ones(2)
        with pytest.raises(CollectiveMismatchError):
            ddp.sync_gradients()

    run_world(2, body)


def test_a_block_that_a_thread_left_suspended_refuses_none_to_later_threads():
    kept = []

    def body(group):
        syncs = [GradientSynchronizer({"w": np.zeros(2)}, group) for _ in range(3)]

        def suspended():
            with syncs[0].uneven():
                yield

        def leave():
            kept.append(suspended())
            next(kept[-1])

        def use(sync):
            with sync.uneven():
                pass

        for work in (leave, partial(use, syncs[1]), partial(use, syncs[2])):
            with ThreadPoolExecutor(1) as threads:  # a thread's number is often that of the one before
                threads.submit(work).result(20)

    run_world(2, body, clock=SYSTEM_CLOCK)


def test_a_refused_step_that_is_not_caught_ends_the_generation_with_its_error():
    def body(group):
        sync = GradientSynchronizer({"w": np.zeros(3)}, group)
        with sync.uneven():
            for weight in [[2, 0, 3], [1]][group.rank]:
                sync({"w": np.ones(3)}, weight)

    first, second = run_world(2, body, return_exceptions=True)
    assert isinstance(first, UsageError)
    assert isinstance(second, GroupAbortedError)
    assert f"{REFUSED} zero" in str(second)


def test_gradients_of_a_module_that_follows_are_as_before_a_step_that_was_refused():
    def body(group):
        module = Plain(w=np.zeros(2))
        ddp = DistributedDataParallel(module, group, gradient_as_bucket_view=True)
        followed = []
        with ddp.uneven(lambda: followed.append(module["w"].grad.tolist())):
            module["w"].grad = np.full(2, 1.0 + group.rank)
            ddp.sync_gradients()
            if group.rank == 0:
                with pytest.raises(UsageError, match=REFUSED):
                    ddp.sync_gradients(0)
        return followed, module["w"].grad.tolist() if group.rank else None

    assert run_world(2, body) == [([], None), ([], [1.5, 1.5])]


def test_a_second_block_in_one_thread_is_refused_as_it_opens():
    """A rank that left one of them would follow there, while the others wait for its part in the other."""

    def body(group):
        first, second = [GradientSynchronizer({"w": np.zeros(3)}, group) for _ in range(2)]
        wrapped = DistributedDataParallel(Plain(w=np.zeros(2)), group)
        with first.uneven():
            for other in (second, wrapped):
                with (
                    pytest.raises(UsageError, match=r"block of another model is open.*\n.*in one synchroniser"),
                    other.uneven(),
                ):
                    pass
            for _ in range(1 + group.rank):
                first({"w": np.ones(3)})
        with second.uneven():
            second({"w": np.ones(3)})

    run_world(2, body)


def test_a_second_block_that_is_refused_leaves_the_first_one_as_it_was():
    """Buffers are not exchanged within it."""

    def body(group):
        module, mean = Plain(w=np.zeros(2)), np.zeros(1)
        module.named_buffers = lambda: [("mean", mean)]
        ddp = DistributedDataParallel(module, group)
        mean[...] = group.rank
        with ddp.uneven():
            with pytest.raises(UsageError, match="open already"), ddp.uneven():
                pass
            module["w"].grad = np.ones(2)
            ddp.sync_gradients()
            return mean.tolist()

    assert run_world(2, body) == [[0.0], [1.0]]


def test_blocks_of_groups_with_no_other_rank_in_common_may_be_open_together():
    """As over the two dimensions of a mesh, where the ranks of a row take equally many of the column's steps."""

    def body(group):
        rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        row, column = [next(filter(None, [group.subgroup(each) for each in parts])) for parts in (rows, columns)]
        outer, inner = GradientSynchronizer({"w": np.zeros(1)}, column), GradientSynchronizer({"w": np.zeros(1)}, row)
        found = []
        with outer.uneven():
            for _ in range(1 + column.rank):
                with inner.uneven():
                    for _ in range(1 + row.rank):
                        found.append(inner({"w": np.ones(1)})["w"][0])
                found.append(outer({"w": np.ones(1)})["w"][0])
        return found

    assert [len(found) for found in run_world(4, body)] == [2, 3, 4, 6]


def test_wherever_the_begin_or_the_end_of_a_block_is_interrupted_none_is_open_behind_it():
    """Neither of the same synchroniser nor of another one."""

    def body(group, place):
        syncs = [GradientSynchronizer({"w": np.zeros(2)}, group) for _ in range(2)]
        struck = False
        if group.rank == 0:
            sys.setprofile(InterruptAt(place, lambda file: file.endswith("ferrorpc/ddp/reducer.py")))
            try:
                with syncs[0].uneven():
                    pass
            except KeyboardInterrupt:
                struck = True
            finally:
                sys.setprofile(None)
        for sync in syncs:
            with suppress(GroupAbortedError, PeerLostError, CollectiveTimeoutError), sync.uneven():
                pass
        return struck

    place = 1
    while run_world(2, partial(body, place=place))[0]:
        place += 1
    assert place > 3
