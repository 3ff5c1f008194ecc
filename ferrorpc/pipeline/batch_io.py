"""What enters and leaves a pipeline: the microbatches of a batch, and the losses or outputs that come of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.batch import check_like, scaled, shapes_of
from ferrorpc.pipeline.stage import pair_of

LossFunction: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""(y, target) of a microbatch -> (loss, gradient of y)."""

LEFT_OUT: Final = ()
"""The gradient of a microbatch of weight 0, for which there is no backward pass: zeros times NaN would be NaN."""
_LOSS: Final = "(loss, gradient of y); a loss of torch does by ferrorpc.torch.with_gradient(loss)"


class BatchIO(ABC):
    """Inputs for the first piece of the model, and what is done with the outputs of the last."""

    def __init__(self, inputs: list[Any]) -> None:
        self._inputs = inputs

    def input(self, microbatch: int) -> Any:
        """x of a microbatch, on the rank of the first piece."""
        return self._inputs[microbatch]

    @abstractmethod
    def output(self, microbatch: int, y: Any) -> None:
        """Takes y of a microbatch from the last piece."""

    @abstractmethod
    def grad(self, microbatch: int) -> Any:
        """The gradient of that y."""


class TrainingBatch(BatchIO):
    """Computes the loss of each output, and its gradient.

    Attributes:
        loss: of the batch so far, on the rank of the last piece; None elsewhere.
    """

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__(inputs)
        self.loss: Any = None
        self._targets: list[Any] = []
        self._loss_weights: list[float] = []
        self._loss_fn: LossFunction | None = None
        self._grads: dict[int, Any] = {}

    def set_targets(self, targets: list[Any], loss_weights: list[float], loss_fn: LossFunction) -> None:
        """For the rank of the last piece: what the outputs are compared with."""
        self._targets, self._loss_weights, self._loss_fn = targets, loss_weights, loss_fn
        if not any(loss_weights):
            self.loss = 0.0

    def output(self, microbatch: int, y: Any) -> None:
        assert self._loss_fn is not None, "only the last stage has outputs"
        weight = self._loss_weights[microbatch]
        if not weight:
            self._grads[microbatch] = LEFT_OUT
            return
        loss, grad = pair_of(self._loss_fn(y, self._targets[microbatch]), "loss_fn", _LOSS)
        if grad is None and y is not None:
            raise UsageError("loss_fn returned None as the gradient of y", hint=f"return {_LOSS}")
        check_like(grad, shapes_of(y), "loss_fn's gradient of y", "y")
        # Also where the weight is 1 a gradient is copied: loss_fn may write that of the next microbatch to the same array.
        self._grads[microbatch] = grad if len(self._targets) == 1 else scaled(grad, weight)
        share = _weighted(loss, weight)
        self.loss = share if self.loss is None else self.loss + share

    def grad(self, microbatch: int) -> Any:
        return self._grads.pop(microbatch)


def _weighted(loss: Any, weight: float) -> Any:
    try:
        return loss * weight
    except TypeError:
        raise UsageError(f"loss_fn returned a {type(loss).__name__} as the loss", hint=f"return {_LOSS}") from None


class InferenceBatch(BatchIO):
    """Collects the outputs. Gradients for a backward pass are set from outside."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__(inputs)
        self.outputs: dict[int, Any] = {}
        self.grads: list[Any] = []

    def output(self, microbatch: int, y: Any) -> None:
        self.outputs[microbatch] = y

    def grad(self, microbatch: int) -> Any:
        return self.grads[microbatch]


def is_left_out(grad_y: Any) -> bool:
    """Whether a gradient is LEFT_OUT, from one stage or from each of several."""
    return isinstance(grad_y, tuple) and all(map(is_left_out, grad_y))
