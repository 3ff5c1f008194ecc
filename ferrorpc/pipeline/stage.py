"""Stages: what a piece of the model must provide, and what the pipeline keeps of it between forward and backward."""

from __future__ import annotations

from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ferrorpc.arrays.base import Kind
from ferrorpc.arrays.kinds import NUMPY, kind_of
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.batch import Shapes, check_like, shapes_of


@runtime_checkable
class Stage(Protocol):
    """A piece of a model. x, y and gradients are arrays of one kind, or tuples of them.

    The stage stores the gradients of its weights itself: `backward` adds them to what is there. It does not write to x or
    grad_y, which may be the batch's memory or another stage's, nor again to what it has returned. The following are optional.

        backward_input(context, grad_y) -> grad_x      the gradient of the input alone
        backward_weight(context, grad_y)               later: adds the gradients of the weights

    With these two, schedules like ZB1P and ZBV fill their idle time with `backward_weight`; `backward` is not needed then.
    `parameters()` or `named_parameters()`, as modules have them, tell the kind of arrays that the stage computes with, and
    allow weights to be tied to another stage's. An attribute `like` that is an array tells the kind, too. An attribute
    `needs_grad_x` is set by the pipeline before each call: False if the gradient of x is not needed, because x comes from the
    batch. An attribute `averages` is true if each backward averages gradients over replicas: then none may be left out.
    """

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Returns (y, context). The context is whatever backward will need; it is freed after the backward."""

    def backward(self, context: Any, grad_y: Any) -> Any:
        """Returns the gradient of x (None where there is none), given that of y."""


def with_aliases(named: Any) -> Any:
    """What a `named_parameters` gives, each parameter under all of its names if it can tell them, as those of torch do."""
    parameters = signature(named).parameters
    tells = "remove_duplicate" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return named(remove_duplicate=False) if tells else named()


class Piece:
    """A stage with the contexts of the microbatches that are between their forward and the end of their backward.

    Args:
        stage: the user's object.
        number: which piece of the model it is.

    Raises:
        UsageError: the stage lacks a method.
    """

    def __init__(self, stage: Any, number: int) -> None:
        if isinstance(stage, type):
            raise UsageError(
                f"stage {number} is the class {stage.__name__}", hint=f"pass an instance of it: {stage.__name__}(...)"
            )
        self.number = number
        self.is_split = callable(getattr(stage, "backward_input", None)) and callable(getattr(stage, "backward_weight", None))
        backs = self.is_split or callable(getattr(stage, "backward", None))
        if not callable(getattr(stage, "forward", None)) or not backs:
            raise UsageError(
                f"stage {number} is a {type(stage).__name__} without forward() or backward()",
                hint="a stage has forward(x) -> (y, context) and backward(context, grad_y) -> grad_x; "
                "a torch module becomes one by ferrorpc.torch.Stage(module)",
            )
        self._stage = stage
        self._contexts: dict[int, tuple[Any, Shapes]] = {}
        """Each with the shape of x, which its gradient must have: another one may fit by broadcasting, and would be wrong in
        silence. None for what comes from the batch, whose gradient nobody takes."""
        self._weights_due: dict[int, tuple[Any, Any]] = {}

    @property
    def held(self) -> int:
        """How many contexts are kept."""
        return len(self._contexts) + len(self._weights_due)

    @property
    def kind(self) -> Kind:
        """The kind of arrays the stage computes with: that of `like`, or of its first parameter; NumPy if it has neither."""
        parameters, first = getattr(self._stage, "parameters", None), getattr(self._stage, "like", None)
        if first is None and callable(parameters):
            first = next(iter(parameters()), None)
        known = kind_of(first)
        # A parameter has its array in `data`. NumPy arrays have a `data`, too, but that is only their memory.
        is_parameter = known is NUMPY and not isinstance(first, np.ndarray)
        return kind_of(getattr(first, "data", None)) if is_parameter else known

    def named_parameters(self, aliases: bool = False) -> dict[str, Any]:
        """Its parameters by name; by position ("0", "1", ...) if the stage has only parameters(); none if it has neither.

        Args:
            aliases: as for `with_aliases`.
        """
        named = getattr(self._stage, "named_parameters", None)
        if callable(named):
            return dict(with_aliases(named) if aliases else named())
        parameters = getattr(self._stage, "parameters", None)
        return {str(place): each for place, each in enumerate(parameters())} if callable(parameters) else {}

    def _told(self) -> Any:
        """The stage, told whether the gradient of x is needed. Each time, because it may be in other pipelines, too."""
        if hasattr(self._stage, "needs_grad_x"):
            self._stage.needs_grad_x = self.number > 0
        return self._stage

    def forward(self, microbatch: int, x: Any, keep_context: bool) -> Any:
        """Returns y. Without a kept context there can be no backward."""
        y, context = pair_of(self._told().forward(x), f"stage {self.number}'s forward", "(y, context)")
        if keep_context:
            self._contexts[microbatch] = context, shapes_of(x) if self.number > 0 else None
        return y

    def backward(self, microbatch: int, grad_y: Any) -> Any:
        """Returns the gradient of x, and frees the context. Raises UsageError if it has not the shape of x."""
        (context, shapes), stage = self._contexts.pop(microbatch), self._told()
        whole = getattr(stage, "backward", None)
        if whole is not None:
            return self._checked(whole(context, grad_y), shapes)
        grad_x = self._checked(stage.backward_input(context, grad_y), shapes)
        stage.backward_weight(context, grad_y)
        return grad_x

    def backward_input(self, microbatch: int, grad_y: Any) -> Any:
        """Returns the gradient of x. A stage whose backward is in one part does all of it now. Raises as `backward`."""
        if not self.is_split:
            return self.backward(microbatch, grad_y)
        context, shapes = self._contexts.pop(microbatch)
        self._weights_due[microbatch] = (context, grad_y)
        return self._checked(self._told().backward_input(context, grad_y), shapes)

    def _checked(self, grad_x: Any, shapes: Shapes) -> Any:
        check_like(grad_x, shapes, f"stage {self.number}'s gradient of x", "x")
        return grad_x

    def backward_weight(self, microbatch: int) -> None:
        """Does what `backward_input` left to do, if anything, and frees the context."""
        if microbatch in self._weights_due:
            self._told().backward_weight(*self._weights_due[microbatch])
            del self._weights_due[microbatch]

    def leave_out(self, microbatch: int) -> None:
        """Frees the context, instead of a backward or of its first part.

        Raises:
            UsageError: each backward averages gradients over replicas. They pair these by their count, so all later ones would
                be means of different microbatches.
        """
        if getattr(self._stage, "averages", False) is True:
            raise UsageError(
                f"microbatch {microbatch} has weight 0, but each backward of stage {self.number} averages over replicas, "
                "which may not leave out the same ones",
                hint="average once a step instead: leave the module unwrapped, and call step() with on_gradients= and a "
                "GradientSynchronizer",
            )
        del self._contexts[microbatch]

    def forget(self) -> None:
        """Frees all contexts, of microbatches that will not be finished."""
        self._contexts.clear()
        self._weights_due.clear()


def pair_of(returned: Any, whose: str, meaning: str) -> tuple[Any, Any]:
    """The two values that a user's function returned. Raises UsageError if it is not a tuple or list of two."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        given = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise UsageError(f"{whose} returned {given}", hint=f"return {meaning}")
    return returned[0], returned[1]
