"""Hooks of tensors, retained gradients and functions of one's own, in backward passes that are split in two."""

from __future__ import annotations

import gc
import weakref

import pytest

from ferrorpc.errors import UsageError

torch = pytest.importorskip("torch")
nn = torch.nn
Stage = pytest.importorskip("ferrorpc.torch").Stage
WIDTH, ROWS = 4, 3


class Changed(nn.Module):
    """Two layers; `watch` is given what is between them, and returns it or something made of it."""

    def __init__(self, watch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.watch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), watch

    def forward(self, x):
        return self.last(torch.tanh(self.watch(self.first(x))))


def gradients(module: nn.Module, is_split: bool) -> list:
    """Of the input and the parameters, after two microbatches."""
    module.zero_grad()
    stage, found = Stage(module, split=is_split), []
    for microbatch in range(2):
        y, context = stage.forward(torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) / 10 - microbatch)
        if is_split:
            found.append(stage.backward_input(context, torch.ones_like(y)))
            stage.backward_weight(context, torch.ones_like(y))
        else:
            found.append(stage.backward(context, torch.ones_like(y)))
    return [*found, *(each.grad.clone() for each in module.parameters())]


def check_same(module: nn.Module) -> None:
    for split, whole in zip(gradients(module, True), gradients(module, False), strict=True):
        assert torch.equal(split, whole)


def test_hooks_of_tensors_may_change_the_gradient_in_place():
    def watch(hidden):
        hidden.register_hook(lambda grad: grad.mul_(0.5).add_(1))
        return hidden

    check_same(Changed(watch))


def test_what_hooks_of_tensors_add_up_is_added_once():
    totals = []

    def watch(hidden):
        hidden.register_hook(lambda grad: totals.append(grad.sum()))
        return hidden

    module = Changed(watch)
    gradients(module, True)
    split = sum(totals)
    totals.clear()
    gradients(module, False)
    assert split == sum(totals)


def test_retained_gradients_are_those_of_a_whole_backward_pass():
    kept = []

    def watch(hidden):
        hidden.retain_grad()
        kept.append(hidden)
        return hidden

    module = Changed(watch)
    gradients(module, True)
    gradients(module, False)
    for split, whole in zip(kept[:2], kept[2:], strict=True):
        assert torch.equal(split.grad, whole.grad)


@pytest.mark.parametrize("change", [lambda grad: grad / grad.norm(), lambda grad: grad + 0.1])
def test_hooks_behind_one_that_makes_something_of_zeros_get_the_gradient_alone(change):
    seen, kept = [], []

    def watch(hidden):
        hidden.register_hook(change)
        hidden.register_hook(lambda grad: seen.append(grad.clone()))
        hidden.retain_grad()
        kept.append(hidden)
        return hidden

    module = Changed(watch)
    check_same(module)
    for found in (seen, [each.grad for each in kept]):
        assert len(found) == 4
        assert all(torch.equal(split, whole) for split, whole in zip(found[:2], found[2:], strict=True))


def test_a_backward_pass_without_hooks_is_split_though_another_is_under_way():
    """Each part of a split one registers hooks of nodes, in a world of threads while another rank does its forward pass."""
    stage = Stage(Changed(lambda hidden: hidden))
    x = torch.ones(ROWS, WIDTH)
    y, first = stage.forward(x)

    def between(hidden):
        stage.backward_input(first, torch.ones_like(y))
        return hidden

    _, second = Stage(Changed(between)).forward(x)
    assert not second.has_hooks


class HalvesInPlace(torch.autograd.Function):
    """x @ weight, whose backward pass changes the gradient that it is given."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad.mul_(0.5)
        return grad @ weight.T, x.T @ grad


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 1)

    def forward(self, x):
        return HalvesInPlace.apply(x, self.weight)


def test_a_function_that_changes_the_gradient_in_place_is_refused():
    with pytest.raises(UsageError, match=r"HalvesInPlaceBackward.*changed in place.*\n.*split=False"):
        gradients(ByHand(), True)
    assert len(gradients(ByHand(), False)) == 3


class Doubled(torch.autograd.Function):
    """Keeps a number under the name that leaves have for their tensor."""

    @staticmethod
    def forward(ctx, weight):
        ctx.variable = 2.0
        return weight * ctx.variable

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.variable


class OfDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x @ Doubled.apply(self.layer.weight) + self.layer.bias


def test_a_function_may_keep_something_under_the_name_variable():
    check_same(OfDoubled())


def test_a_backward_pass_in_two_leaves_nothing_behind():
    """A hook that stays at a node refers to the node by what it belongs to, which no collection of garbage finds."""
    stage = Stage(Changed(lambda hidden: hidden))
    y, context = stage.forward(torch.ones(ROWS, WIDTH))
    stage.backward_input(context, torch.ones_like(y))
    stage.backward_weight(context, torch.ones_like(y))
    split = weakref.ref(context.split)
    del context
    gc.collect()
    assert split() is None


class Stop(torch.autograd.Function):
    """Through which no gradient flows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(x + Stop.apply(self.first(x)))


def test_weights_that_no_gradient_reaches_get_none():
    stage = Stage(Stopped())
    y, context = stage.forward(torch.ones(ROWS, WIDTH))
    stage.backward_input(context, torch.ones_like(y))
    stage.backward_weight(context, torch.ones_like(y))
    assert stage.module.first.weight.grad is None
    assert stage.module.last.bias.grad.tolist() == [ROWS] * WIDTH


def test_a_gradient_may_come_from_inference_mode():
    stage = Stage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    with torch.inference_mode():
        grad = torch.ones(ROWS, WIDTH)
    _, context = stage.forward(torch.ones(ROWS, WIDTH))
    stage.backward_input(context, grad)
    stage.backward_weight(context, grad)
    assert stage.module[1].bias.grad.tolist() == [ROWS] * WIDTH
