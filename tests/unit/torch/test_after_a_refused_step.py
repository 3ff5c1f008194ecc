"""What a step leaves behind that was refused, or that closes an uneven block: nothing that a later one would see."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest

from ferrorpc.errors import CollectiveMismatchError, UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from ferrorpc.torch import DistributedDataParallel  # noqa: E402


def test_buffers_that_a_refused_step_has_exchanged_are_never_written():
    def body(group):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        ddp = DistributedDataParallel(net, group)
        with pytest.raises(UsageError, match="sum to zero"), ddp.weighted(0.0):
            ddp(torch.ones(5, 3)).sum().backward()
        with torch.no_grad():
            net[1].running_mean.fill_(100.0)  # as load_state_dict does
        with ddp.uneven(lambda: None):
            ddp.zero_grad()
            net.eval()
            ddp(torch.ones(5, 3)).sum().backward()
            return net[1].running_mean.tolist()

    assert run_world(2, body) == [[100.0] * 4] * 2


@pytest.mark.parametrize("views", [True, False])
def test_gradients_after_an_uneven_block_are_those_of_its_last_step(views):
    """Also where they lie in buckets, in which the closing round puts zeros."""

    def body(group):
        net = torch.nn.Linear(2, 1, bias=False)
        ddp = DistributedDataParallel(net, group, gradient_as_bucket_view=views)
        with ddp.uneven(lambda: None):
            for _ in range(1 + group.rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 2)).sum().backward()
        return net.weight.grad.tolist()

    assert run_world(2, body)[1] == [[1.0, 1.0]]


@pytest.mark.parametrize("views", [True, False])
def test_a_part_that_is_being_accumulated_as_an_uneven_block_ends_is_kept(views):
    def body(group):
        net = torch.nn.Linear(2, 1, bias=False)
        ddp = DistributedDataParallel(net, group, gradient_as_bucket_view=views)
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.zero_grad(set_to_none=False)
        with ddp.uneven(lambda: None), ddp.no_sync():
            ddp(torch.ones(1, 2) * (1 + group.rank)).sum().backward()
        ddp(torch.ones(1, 2)).sum().backward()
        return net.weight.grad.tolist()

    assert run_world(2, body) == [[[2.5, 2.5]]] * 2


@pytest.mark.parametrize("weight", [0.0, 3e38])
@pytest.mark.parametrize("views", [True, False])
def test_the_error_of_a_refused_step_says_which_gradients_to_compute_again(views, weight):
    """Those in the buckets were added up there; all others are as before."""

    def body(group):
        net, x = torch.nn.Linear(2, 1, bias=False), torch.full((1, 2), 1.0 + group.rank)
        ddp = DistributedDataParallel(net, group, gradient_as_bucket_view=views)
        with ddp.no_sync():
            ddp(x).sum().backward()
        with pytest.raises(UsageError, match="views of buckets are lost: compute them again"), ddp.weighted(weight):
            ddp(0 * x).sum().backward()
        kept = net.weight.grad.tolist() == x.tolist()
        ddp.zero_grad()
        with ddp.weighted(1.0):
            ddp(x).sum().backward()
        return kept, net.weight.grad.tolist()

    assert run_world(2, body) == [(not views, [[1.5, 1.5]])] * 2


def test_the_gradients_of_another_module_in_a_refused_backward_pass_are_waited_for_all_the_same():
    def body(group):
        inner, outer = (DistributedDataParallel(torch.nn.Linear(3, 3), group) for _ in range(2))
        found = []
        for weight in (1.0, 0.0, 1.0):
            inner.zero_grad()
            outer.zero_grad()
            refused = nullcontext() if weight else pytest.raises(UsageError, match="sum to zero")
            with refused, inner.weighted(weight), outer.weighted(weight):
                outer(inner(torch.ones(2, 3) * (1 + group.rank))).sum().backward()
            found.append([each.grad.abs().sum().item() for each in (*inner.parameters(), *outer.parameters())])
        return found[2] == found[0], found

    for is_same, found in run_world(2, body):
        assert is_same, found


def test_each_module_in_a_backward_pass_is_averaged_where_the_weights_of_one_differ():
    def body(group):
        inner, outer = (
            DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), group, check_every=every) for every in (0, 2)
        )
        with torch.no_grad():
            outer.module.weight.fill_(1.0 + group.rank)
        found = []
        for step in range(3):
            inner.zero_grad()
            outer.zero_grad()
            different = pytest.raises(CollectiveMismatchError, match="differ") if step == 1 else nullcontext()
            with different:
                outer(inner(torch.ones(1, 1))).sum().backward()
            found.append(inner.module.weight.grad.item())
        return found

    assert run_world(2, body) == [[1.5] * 3] * 2


def test_nothing_of_a_refused_step_waits_for_a_garbage_collection():
    def body(group):
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), group)

        def refused():
            x = torch.ones(5, 3)
            with ddp.weighted(0.0):
                try:
                    ddp(x).sum().backward()
                except UsageError as error:
                    return weakref.ref(x), weakref.ref(error)
            raise AssertionError("the weights sum to zero")

        gc.disable()
        try:
            return [reference() is None for reference in refused()]
        finally:
            gc.enable()

    assert run_world(2, body) == [[True, True]] * 2
