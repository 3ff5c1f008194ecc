"""What enters and leaves a pipeline: the microbatches of a batch, and the losses or outputs that come of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    """Inputs for the first piece of the model, and what is done with the outputs of the last.

    Attributes:
        inputs: x of each microbatch, on the rank of the first piece.
        grads: on the rank of the last piece, the gradient of y of each microbatch whose backward is still to come.
    """

    def __init__(self, inputs: Sequence[Any], grads: Sequence[Any] = ()) -> None:
        self.inputs = inputs
        self.grads = dict(enumerate(grads))

    @abstractmethod
    def output(self, microbatch: int, y: Any) -> None:
        """Takes y of a microbatch from the last piece."""


class TrainingBatch(BatchIO):
    """Computes the loss of each output, and its gradient.

    Args:
        targets, loss_weights, loss_fn: what the outputs are compared with, on the rank of the last piece.

    Attributes:
        loss: of the batch so far, on the rank of the last piece; None elsewhere.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] = (),
        loss_weights: Sequence[float] = (),
        loss_fn: LossFunction | None = None,
    ) -> None:
        super().__init__(inputs)
        self.loss: Any = 0.0 if targets and not any(loss_weights) else None
        self._targets = targets
        self._loss_weights = loss_weights
        self._loss_fn = loss_fn

    def output(self, microbatch: int, y: Any) -> None:
        assert self._loss_fn is not None, "only the last stage has outputs"
        weight = self._loss_weights[microbatch]
        if not weight:
            self.grads[microbatch] = LEFT_OUT
            return
        loss, grad = pair_of(self._loss_fn(y, self._targets[microbatch]), "loss_fn", _LOSS)
        if grad is None and y is not None:
            raise UsageError("loss_fn returned None as the gradient of y", hint=f"return {_LOSS}")
        check_like(grad, shapes_of(y), "loss_fn's gradient of y", "y")
        # Also where the weight is 1 a gradient is copied: loss_fn may write that of the next microbatch to the same array.
        self.grads[microbatch] = grad if len(self._targets) == 1 else scaled(grad, weight)
        share = _weighted(loss, weight)
        self.loss = share if self.loss is None else self.loss + share


def _weighted(loss: Any, weight: float) -> Any:
    try:
        return loss * weight
    except TypeError:
        raise UsageError(f"loss_fn returned a {type(loss).__name__} as the loss", hint=f"return {_LOSS}") from None


class InferenceBatch(BatchIO):
    """Collects the outputs."""

    def __init__(self, inputs: Sequence[Any], grads: Sequence[Any] = ()) -> None:
        super().__init__(inputs, grads)
        self.outputs: dict[int, Any] = {}

    def output(self, microbatch: int, y: Any) -> None:
        self.outputs[microbatch] = y


def is_left_out(grad_y: Any) -> bool:
    """Whether a gradient is LEFT_OUT, from one stage or from each of several."""
    return isinstance(grad_y, tuple) and all(map(is_left_out, grad_y))
