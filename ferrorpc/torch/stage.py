"""A torch module as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ferrorpc.arrays.kinds import spec_of
from ferrorpc.errors import UsageError
from ferrorpc.torch.given import module_given
from ferrorpc.torch.split import SplitBackward


@dataclass(slots=True)
class Context:
    """What a backward needs of its forward.

    Attributes:
        inputs: what the module was given: leaves of the graph, those that can have gradients.
        outputs: what it returned.
        several: whether a tuple came in.
        split: the backward, once the first half of it was done.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    several: bool
    split: SplitBackward | None = None


class Stage:
    """A module as a piece of a pipelined model; autograd does the backward.

        pipe = ferrorpc.Pipeline(ferrorpc.torch.Stage(module), group, schedule="zbv")

    Several inputs come to the module as several arguments, and it may return a tuple of tensors and Nones. Gradients are added
    to the parameters' `.grad`, as `loss.backward()` does.

    Args:
        module: any torch module. What it keeps itself (running statistics) is updated by every microbatch.
        split: whether schedules may do its backward in two. Say no for modules whose graph is one node that does everything,
            as compiled ones: it would do everything twice. And for re-entrant checkpoints, which torch refuses then.

    Raises:
        UsageError: it is no module of torch.

    Attributes:
        needs_grad_x: whether gradients of inputs are computed. A pipeline says no where the stage is the model's first.
    """

    def __init__(self, module: torch.nn.Module, split: bool = True) -> None:
        self.module = module_given(module)
        self.needs_grad_x = True
        if split:
            self.backward_input = self._backward_input
            self.backward_weight = self._backward_weight

    def __repr__(self) -> str:
        whole = "" if hasattr(self, "backward_input") else ", backward in one"
        return f"<Stage of {type(self.module).__name__}{whole}>"

    @property
    def like(self) -> torch.Tensor:
        """What x is to be like: a tensor, where the module's are."""
        own = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.empty(0) if own is None else own.detach()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The module's."""
        return iter(self.module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The module's."""
        return iter(self.module.named_parameters())

    def forward(self, x: Any) -> tuple[Any, Context]:
        """(y, context): y without its graph, which is in the context.

        Raises:
            UsageError: the module was given, or returned, something else than tensors.
        """
        several = isinstance(x, tuple)
        inputs = tuple(_leaf(each, self.needs_grad_x) for each in (x if several else (x,)))
        with torch.enable_grad():
            y = self.module(*(_entering(each, self.needs_grad_x) for each in inputs))
        outputs = y if isinstance(y, tuple) else (y,)
        detached = tuple(
            # One tensor for several stages: what one of them writes to its own is not the others'.
            _detached(each, self.module, is_again=any(each is before for before in outputs[:place]))
            for place, each in enumerate(outputs)
        )
        return (detached if isinstance(y, tuple) else detached[0]), Context(inputs, outputs, several)

    def backward(self, context: Context, grad_y: Any) -> Any:
        """The whole backward at once. Returns the gradient of x."""
        outputs, grads = _differentiable(context.outputs, grad_y)
        if outputs:
            torch.autograd.backward(outputs, grads)
        return _gradients(context)

    def _backward_input(self, context: Context, grad_y: Any) -> Any:
        outputs, grads = _differentiable(context.outputs, grad_y)
        context.split = SplitBackward([each for each in context.inputs if each is not None and each.requires_grad], outputs)
        context.split.input(grads)
        return _gradients(context)

    def _backward_weight(self, context: Context, grad_y: Any) -> None:
        assert context.split is not None, "the weights' part comes after the input's"
        context.split.weight()


def with_gradient(criterion: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
    """A `loss_fn` for pipelines from a loss as torch has them.

        loss = pipe.step(x, target, ferrorpc.torch.with_gradient(torch.nn.functional.cross_entropy))

    Args:
        criterion: criterion(y, target) -> a tensor with one element.

    Returns:
        loss_fn(y, target) -> (loss, gradient of y); for a tuple y a tuple of gradients.

    Raises:
        UsageError: it is no function, or a class of losses in place of a loss.
    """
    if isinstance(criterion, type):
        raise UsageError(f"criterion={criterion.__name__} is a class", hint=f"pass an instance of it: {criterion.__name__}()")
    if not callable(criterion):
        hint = "pass a loss such as torch.nn.functional.cross_entropy"
        raise UsageError(f"criterion={criterion!r} is no function", hint=hint)

    def loss_fn(y: Any, target: Any) -> tuple[torch.Tensor, Any]:
        leaves = tuple(_leaf(each) for each in y) if isinstance(y, tuple) else _leaf(y)
        with torch.enable_grad():
            loss = criterion(leaves, target)
        _check_loss(loss)
        loss.backward()
        grads = tuple(each.grad for each in leaves) if isinstance(leaves, tuple) else leaves.grad
        return loss.detach(), grads

    return loss_fn


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"the criterion gave a {type(loss).__name__}", hint="let it give a tensor, without .item()")
    if loss.numel() != 1:
        raise UsageError(
            f"the criterion gave {spec_of(loss.detach())}, and not one number", hint='let it add up: reduction="mean" or "sum"'
        )
    if not loss.requires_grad:
        raise UsageError(
            "the criterion's loss does not lead back to y", hint="compute it from y, outside of torch.inference_mode()"
        )


class _Entry(torch.autograd.Function):
    """A leaf as something that is none, in the same memory: modules may write to what they are given (`ReLU(inplace=True)`)."""

    @staticmethod
    def forward(context: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _entering(leaf: Any, is_from_inside: bool) -> Any:
    """What the module is given for a leaf."""
    if leaf is not None and leaf.requires_grad:
        return _Entry.apply(leaf)
    # Microbatches are views of one batch: autograd would take writes to one for writes to all, but for `.data`.
    return leaf if leaf is None or is_from_inside else leaf.data


def _leaf(x: Any, needs_grad: bool = True) -> Any:
    """A leaf with the values of x, which requires a gradient if one is needed and it can have one."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"a stage of torch was given a {type(x).__name__}", hint="pass tensors, such as torch.from_numpy(x)")
    return x.detach().requires_grad_(needs_grad and (x.is_floating_point() or x.is_complex()))


def _detached(y: Any, module: torch.nn.Module, is_again: bool) -> Any:
    if y is None:
        return None
    if not isinstance(y, torch.Tensor):
        raise UsageError(
            f"{type(module).__name__} returned a {type(y).__name__}, which cannot go on to the next stage",
            hint="wrap the module in one that returns a tensor, or a tuple of tensors and Nones",
        )
    return y.detach().clone() if is_again else y.detach()


def _differentiable(outputs: tuple[Any, ...], grad_y: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs through which gradients flow, and these."""
    grads = grad_y if isinstance(grad_y, tuple) else (grad_y,)
    for each in grads:
        if each is not None and not isinstance(each, torch.Tensor):
            raise UsageError(
                f"a stage of torch was given a gradient that is a {type(each).__name__}",
                hint="let loss_fn give tensors, as ferrorpc.torch.with_gradient(loss) does",
            )
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None and y.requires_grad]
    return [y for y, _ in pairs], [grad for _, grad in pairs]


def _gradients(context: Context) -> Any:
    grads = tuple(None if each is None else each.grad for each in context.inputs)
    return grads if context.several else grads[0]
