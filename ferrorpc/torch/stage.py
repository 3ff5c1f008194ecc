"""Stage: a torch module as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch

from ferrorpc.arrays.kinds import spec_of
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.batch import tuple_like
from ferrorpc.pipeline.stage import with_aliases
from ferrorpc.torch.arguments import checked_module
from ferrorpc.torch.data_parallel import DistributedDataParallel, averages
from ferrorpc.torch.split_backward import SplitBackward, hooks_registered


@dataclass(slots=True)
class Context:
    """What a backward pass needs from its forward pass.

    Attributes:
        inputs: x of leaves of the graph; those of floating-point and complex types require gradients.
        outputs: what the module returned.
        has_hooks: whether hooks were registered meanwhile. Then its backward pass is not split.
        split: the split backward pass, once its first half is done; None if it was not split.
    """

    inputs: Any
    outputs: Any
    has_hooks: bool
    split: SplitBackward | None = None


@cache
def _load_autograd() -> None:
    """Makes torch import what it imports in the first backward pass that is given a gradient.

    That takes seconds, which the ranks of a pipeline would spend one after the other in their first step.
    """
    with torch.inference_mode(False):
        torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True), torch.ones((), device="cpu"))


class Stage:
    """A module as a piece of a pipelined model. Autograd does the backward pass.

        pipe = ferrorpc.Pipeline(ferrorpc.torch.Stage(module), group, schedule="zbv")

    Several inputs are passed to the module as several arguments (to a Sequential, which takes one, as a tuple), and it may
    return a tuple of tensors and Nones. On `edges` a value for one of several neighbours may be such a tuple, too. Gradients
    are added to the parameters' `.grad`, as `loss.backward()` does.

    What another stage gives comes to the device of the module's first parameter, or first buffer; without either, to torch's
    default device, which is the CPU unless `torch.set_default_device` was called. So a module of activations alone would
    compute on the CPU between stages on GPUs. A buffer says where it is to be:
    `module.register_buffer("place", torch.empty(0, device=device), persistent=False)`.

    Args:
        module: any torch module. Its own state, such as running statistics, is updated by every microbatch.
        split: whether schedules may split its backward pass in two. Pass False for modules whose graph is one node, such as
            compiled ones, which would do everything twice; for checkpoints, which would run again for each weight (and count
            in running statistics; torch refuses re-entrant ones); and for functions of one's own whose backward does more than
            return gradients, such as adding to a `main_grad`, because where inputs and weights meet it runs in both parts.
            A forward pass in which hooks are registered, such as `Tensor.register_hook` does, gets its backward pass in one.

    Raises:
        UsageError: it is no torch module.

    Attributes:
        needs_grad_x: whether gradients of inputs are computed. Pipelines set it before each call: to False if it is the model's
            first stage.
    """

    def __init__(self, module: torch.nn.Module, split: bool = True) -> None:
        self.module = checked_module(module)
        self.needs_grad_x = True
        _load_autograd()
        if split:
            self.backward_input = self._backward_input
            self.backward_weight = self._backward_weight

    def __repr__(self) -> str:
        whole = "" if hasattr(self, "backward_input") else ", backward in one"
        return f"<Stage of {type(self.module).__name__}{whole}>"

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the kind and device that x must have: one of the module's, or one on torch's default device."""
        own = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.empty(0) if own is None else own.data  # a lazy one has no detach()

    @property
    def averages(self) -> bool:
        """Whether each backward pass averages gradients over replicas, as that of a wrapped module does."""
        return averages(self.module)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The module's."""
        return iter(self.module.parameters())

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The module's; with remove_duplicate=False under all of their names."""
        named = self.module.named_parameters
        return iter(named() if remove_duplicate else with_aliases(named))

    def forward(self, x: Any) -> tuple[Any, Context]:
        """Returns (y, context): y is detached, and the context has its graph.

        Raises:
            UsageError: the module was given, or returned, anything but tensors.
        """
        inputs = _mapped(partial(_leaf, needs_grad=self.needs_grad_x), x)
        takes_one = not isinstance(x, tuple) or type(_innermost(self.module)).forward is torch.nn.Sequential.forward
        hooks = hooks_registered()
        with torch.enable_grad():
            given = _mapped(partial(_module_input, is_from_stage=self.needs_grad_x), inputs)
            outputs = _mapped(partial(_output, module=self.module), self.module(given) if takes_one else self.module(*given))
        detached = _mapped(partial(_detached, before=[]), outputs)
        return detached, Context(inputs, outputs, hooks_registered() != hooks)

    def backward(self, context: Context, grad_y: Any) -> Any:
        """The whole backward pass. Returns the gradient of x."""
        outputs, grads = _differentiable(context.outputs, grad_y)
        if outputs:
            torch.autograd.backward(outputs, grads)
        return _mapped(_grad_of, context.inputs)

    def _backward_input(self, context: Context, grad_y: Any) -> Any:
        if context.has_hooks:
            return self.backward(context, grad_y)
        outputs, grads = _differentiable(context.outputs, grad_y)
        inputs = [each for each in _flat(context.inputs) if each is not None and each.requires_grad]
        context.split = SplitBackward(inputs, outputs)
        context.split.input(grads)
        return _mapped(_grad_of, context.inputs)

    def _backward_weight(self, context: Context, grad_y: Any) -> None:
        if context.split is not None:
            context.split.weight()


def with_gradient(criterion: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
    """Makes a `loss_fn` for pipelines from a torch loss.

        loss = pipe.step(x, target, ferrorpc.torch.with_gradient(torch.nn.functional.cross_entropy))

    Args:
        criterion: criterion(y, target) -> a tensor with one element. If it has weights of its own, put them into the last
            stage: here they would get the gradients of each microbatch's loss unscaled, also with reduction="mean".

    Returns:
        loss_fn(y, target) -> (loss, gradient of y); for a tuple y a tuple of gradients.

    Raises:
        UsageError: it is no function, or a class of losses instead of an instance.
    """
    if isinstance(criterion, type):
        raise UsageError(f"criterion={criterion.__name__} is a class", hint=f"pass an instance of it: {criterion.__name__}()")
    if not callable(criterion):
        hint = "pass a loss such as torch.nn.functional.cross_entropy"
        raise UsageError(f"criterion={criterion!r} is no function", hint=hint)

    def loss_fn(y: Any, target: Any) -> tuple[torch.Tensor, Any]:
        leaves = _mapped(_leaf, y)
        with torch.enable_grad():
            loss = criterion(_mapped(partial(_module_input, is_from_stage=True), leaves), target)
        _check_loss(loss)
        loss.backward()
        return loss.detach(), _mapped(_grad_of, leaves)

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


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    """What is called in the end, where torch.compile or DistributedDataParallel wrap a module."""
    inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
    return module if inner is None else _innermost(inner)


class _NonLeaf(torch.autograd.Function):
    """Makes a non-leaf of a leaf, in the same memory: modules and losses may write to their input (`ReLU(inplace=True)`)."""

    @staticmethod
    def forward(context: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _module_input(leaf: Any, is_from_stage: bool) -> Any:
    """What the module, or the loss, gets for a leaf."""
    if leaf is not None and leaf.requires_grad:
        return _NonLeaf.apply(leaf)
    # Microbatches are views of one batch. Without `.data` autograd would treat writes to one as writes to all.
    return leaf if leaf is None or is_from_stage else leaf.data


def _leaf(x: Any, needs_grad: bool = True) -> Any:
    """A leaf with the values of x. It requires a gradient if one is needed and its dtype has gradients."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"a stage of torch was given a {type(x).__name__}", hint="pass tensors, such as torch.from_numpy(x)")
    if x.is_inference() and not torch.is_inference_mode_enabled():
        x = x.clone()  # which a graph may save; stages compute one in any mode
    return x.detach().requires_grad_(needs_grad and (x.is_floating_point() or x.is_complex()))


def _output(y: Any, module: torch.nn.Module) -> Any:
    """An output, checked; a copy if it may be in memory that the module keeps, which later microbatches may change."""
    if y is None:
        return None
    if not isinstance(y, torch.Tensor):
        raise UsageError(
            f"{type(module).__name__} returned a {type(y).__name__}, which cannot go on to the next stage",
            hint="wrap the module in one that returns a tensor, or a tuple of tensors and Nones",
        )
    counts_writes = not y.is_inference()
    is_new = y.grad_fn is not None and not y._is_view() and counts_writes and not y._version
    return y if is_new else y.clone()


def _detached(y: Any, before: list[Any]) -> Any:
    """An output for the next stage; a copy if it shares memory with one before, which another stage may write to."""
    if y is None:
        return None
    is_shared = any(each is y or torch._C._is_alias_of(y, each) for each in before)
    before.append(y)
    return y.detach().clone() if is_shared else y.detach()


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What the function makes of a value; of a tuple, a tuple of what it makes of its members, a named one if that is."""
    return tuple_like(value, [_mapped(function, each) for each in value]) if isinstance(value, tuple) else function(value)


def _flat(value: Any) -> list[Any]:
    """The members of a tuple and of those in it, or the value by itself."""
    return [each for member in value for each in _flat(member)] if isinstance(value, tuple) else [value]


def _differentiable(outputs: Any, grad_y: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that gradients flow through, and these gradients."""
    pairs = list(_pairs(outputs, grad_y))
    return [y for y, _ in pairs], [grad for _, grad in pairs]


def _pairs(y: Any, grad: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if y is None or grad is None:
        return
    if isinstance(y, tuple):
        for member, each in zip(y, grad, strict=True):
            yield from _pairs(member, each)
    elif not isinstance(grad, torch.Tensor):
        raise UsageError(
            f"a stage of torch was given a gradient that is a {type(grad).__name__}",
            hint="let loss_fn give tensors, as ferrorpc.torch.with_gradient(loss) does",
        )
    elif y.requires_grad:
        yield y, grad


def _grad_of(leaf: Any) -> Any:
    return None if leaf is None else leaf.grad
