"""Pipeline parallelism in NumPy: a network for handwritten digits, cut into stages.

    ferrorpc run -n 3 examples/pipeline_digits.py
    ferrorpc run -n 3 examples/pipeline_digits.py --schedule zb1p                      a backward pass in two parts
    ferrorpc run -n 2 examples/pipeline_digits.py --schedule interleaved --chunks 2    two stages on each process

Each process has only its own stages of the network. A batch is split into microbatches, which pass through the stages in the
order of the schedule. The gradients are those of the whole batch, so any number of processes and any schedule learn the same
weights, up to rounding. At the end the last step is drawn as it was recorded, above the schedule's simulation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from digits_ddp import Digits, load, positive
from digits_model import Array, Momentum, accumulate, softmax_cross_entropy

import ferrorpc

WIDTHS = (64, 384, 384, 384, 384, 384, 384, 384, 10)
"""The features of each layer. There are eight layers, so there can be up to eight stages."""
BATCH = 256


class DenseStage:
    """Some successive layers of the network, as a stage of a pipeline.

    Several microbatches are between their forward and their backward at the same time. So a stage does not store what its
    backward needs, but returns it from `forward`, and gets it back.

    Args:
        layers: the numbers of the layers.
        seed: decides, with a layer's number, its initial weights; so they do not depend on how the network is cut.
    """

    def __init__(self, layers: Sequence[int], seed: int) -> None:
        self.layers = list(layers)
        self.weights = [ferrorpc.Parameter(self._initial(layer, seed)) for layer in layers]
        self.biases = [ferrorpc.Parameter(np.zeros(WIDTHS[layer + 1], np.float32)) for layer in layers]

    @staticmethod
    def _initial(layer: int, seed: int) -> Array:
        inputs, outputs = WIDTHS[layer], WIDTHS[layer + 1]
        bound = np.sqrt(6 / (inputs + outputs))
        return np.random.default_rng((seed, layer)).uniform(-bound, bound, (inputs, outputs)).astype(np.float32)

    def parameters(self) -> Iterator[ferrorpc.Parameter]:
        """The parameters, for the optimizer."""
        return iter([*self.weights, *self.biases])

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Returns y, (rows, features), and the context for the backward: the inputs of all layers, and y."""
        inputs = []
        for layer, weight, bias in zip(self.layers, self.weights, self.biases, strict=True):
            inputs.append(x)
            x = x @ weight.data + bias.data
            if layer < len(WIDTHS) - 2:
                x = np.tanh(x)
        return x, {"inputs": inputs, "output": x}

    def backward_input(self, context: Any, grad_y: Array) -> Array:
        """Returns the gradient of x. Stores in the context what `backward_weight` will need."""
        outputs = [*context["inputs"][1:], context["output"]]
        context["grads"] = []
        for layer, weight, y in zip(reversed(self.layers), reversed(self.weights), reversed(outputs), strict=True):
            if layer < len(WIDTHS) - 2:
                grad_y = grad_y * (1 - y * y)
            context["grads"].append(grad_y)
            grad_y = grad_y @ weight.data.T
        return grad_y

    def backward_weight(self, context: Any, grad_y: Array) -> None:
        """Adds to the gradients of weights and biases. Schedules such as zb1p call it later, when the rank is idle."""
        for weight, bias, x, grad in zip(self.weights, self.biases, context["inputs"], reversed(context["grads"]), strict=True):
            accumulate(weight, x.T @ grad)
            accumulate(bias, grad.sum(axis=0))


def my_stages(schedule: ferrorpc.schedules.Schedule, rank: int, seed: int) -> list[DenseStage]:
    """This rank's stages: the layers are distributed evenly over all pieces of the network."""
    shares = np.array_split(np.arange(len(WIDTHS) - 1), schedule.virtual_stages)
    return [DenseStage([int(layer) for layer in shares[piece]], seed) for piece in schedule.pieces(rank)]


def train(pipe: ferrorpc.Pipeline, stages: Sequence[DenseStage], data: Digits, options: Any) -> list[float]:
    """Trains for `options.epochs`. Returns the mean loss of each epoch on the rank of the last stage, [] elsewhere."""
    optimizer = Momentum((each for stage in stages for each in stage.parameters()), rate=options.rate)
    curve = []
    for epoch in range(options.epochs):
        order = np.random.default_rng((options.seed, epoch)).permutation(len(data.train_labels))
        losses = []
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            losses.append(pipe.step(data.train_images[rows], data.train_labels[rows], softmax_cross_entropy))
            optimizer.step()
        if losses[0] is not None:
            curve.append(float(np.mean(losses)))
    return curve


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="train a small network on handwritten digits, cut into pipeline stages")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(ferrorpc.schedules.NAMED)}")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="stages of each process, where the schedule leaves it open")
    parser.add_argument("--out", type=Path, default=Path("out/pipeline.svg"), help="the picture, .png or .svg")
    options = parser.parse_args()

    with ferrorpc.init_process_group() as group:
        if group.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)  # now, so that no training ends with its error
        data = load(group, options.seed)
        schedule = ferrorpc.schedules.named(options.schedule, group.size, options.microbatches, options.chunks)
        if schedule.virtual_stages > len(WIDTHS) - 1:
            raise SystemExit(f"{len(WIDTHS) - 1} layers are too few for {schedule.virtual_stages} stages")
        stages = my_stages(schedule, group.rank, options.seed)
        pipe = ferrorpc.Pipeline(stages, group, schedule)
        started = time.monotonic()
        curve = train(pipe, stages, data, options)
        seconds = time.monotonic() - started
        recorded = pipe.recorded()
        logits = pipe.forward(data.test_images)
        if group.rank == 0:
            draw = recorded.to_svg if options.out.suffix == ".svg" else recorded.to_png
            draw(options.out, beside=schedule.simulate(**recorded.costs(schedule)))
            print(f"{schedule}: {options.epochs} epochs in {seconds:.1f} s, backend {group.backend}")
            print(f"the last step, recorded and simulated: {options.out}")
        if logits is not None:
            print(f"loss {curve[0]:.4f} at first, {curve[-1]:.4f} at last")
            print(f"test accuracy {(logits.argmax(axis=1) == data.test_labels).mean():.3f}")


if __name__ == "__main__":
    main()
