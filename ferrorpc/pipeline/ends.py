"""The ends of a pipeline: where a batch's microbatches go in, and what becomes of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

from ferrorpc.pipeline.batch import check_like, scaled
from ferrorpc.pipeline.stage import two_of

LossFunction: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""(y, target) of a microbatch -> (loss, gradient of y)."""


_LOSS: Final = "(loss, gradient of y); a loss of torch does by ferrorpc.torch.with_gradient(loss)"


class Ends(Protocol):
    """Where values enter and leave the pipeline."""

    def input(self, microbatch: int) -> Any:
        """x of a microbatch, on the rank of the first piece."""

    def output(self, microbatch: int, y: Any) -> None:
        """Takes the last piece's y of a microbatch."""

    def grad(self, microbatch: int) -> Any:
        """The gradient of that y."""


class Training:
    """Microbatches in, losses out."""

    def __init__(self, inputs: list[Any]) -> None:
        self.loss: Any = None
        self._inputs = inputs
        self._targets: list[Any] = []
        self._shares: list[float] = []
        self._loss_fn: LossFunction | None = None
        self._grads: dict[int, Any] = {}

    def expect(self, targets: list[Any], shares: list[float], loss_fn: LossFunction) -> None:
        """On the rank of the last stage: what outputs are compared with."""
        self._targets, self._shares, self._loss_fn = targets, shares, loss_fn

    def input(self, microbatch: int) -> Any:
        return self._inputs[microbatch]

    def output(self, microbatch: int, y: Any) -> None:
        assert self._loss_fn is not None, "only the last stage has outputs"
        loss, grad = two_of(self._loss_fn(y, self._targets[microbatch]), "loss_fn", _LOSS)
        check_like(grad, y, "loss_fn's gradient of y")
        share = self._shares[microbatch]
        self._grads[microbatch] = scaled(grad, share)
        if share:  # The loss of one that counts nothing may be no number: a mean over nothing.
            self.loss = loss * share if self.loss is None else self.loss + loss * share

    def grad(self, microbatch: int) -> Any:
        return self._grads.pop(microbatch)


class Inference:
    """Microbatches in, outputs out; gradients as they are given."""

    def __init__(self, inputs: list[Any]) -> None:
        self.outputs: dict[int, Any] = {}
        self.grads: list[Any] = []
        self._inputs = inputs

    def input(self, microbatch: int) -> Any:
        return self._inputs[microbatch]

    def output(self, microbatch: int, y: Any) -> None:
        self.outputs[microbatch] = y

    def grad(self, microbatch: int) -> Any:
        return self.grads[microbatch]
