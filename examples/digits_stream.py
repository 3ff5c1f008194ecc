"""Data-parallel training without modules: GradientSynchronizer and a backward pass written by hand.

    ferrorpc run -n 2 examples/digits_stream.py
    ferrorpc run -n 3 examples/digits_stream.py --hook int8         compressed gradients; or --hook powersgd

The network is a dict of arrays. As soon as the backward pass has computed a layer's gradients, it gives them to `step.ready`,
and they are averaged while it computes those of the layer before. So communication is hidden behind computation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from digits_ddp import Digits, load, my_batches, plot, positive
from digits_model import Array, softmax_cross_entropy
from numpy.typing import NDArray

import ferrorpc

HOOKS: Final[dict[str, Callable[[], ferrorpc.hooks.Hook | None]]] = {
    "none": lambda: None,
    "int8": lambda: ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.Compress("int8")),
    "powersgd": lambda: ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.PowerSGD(2)),
}

Weights = dict[str, dict[str, Array]]
"""For each layer, "weight" of shape (inputs, outputs) and "bias" of shape (outputs,)."""


def initial_weights(widths: tuple[int, ...], seed: int) -> Weights:
    """The weights of linear layers, for a network with tanh between them."""
    random = np.random.default_rng(seed)
    weights = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = np.sqrt(6 / (inputs + outputs))
        drawn = random.uniform(-bound, bound, (inputs, outputs)).astype(np.float32)
        weights[f"layer{number}"] = {"weight": drawn, "bias": np.zeros(outputs, np.float32)}
    return weights


def forward(weights: Weights, images: Array) -> list[Array]:
    """Returns the input of each layer, and the logits at the end."""
    activations = [images]
    for layer in weights.values():
        activations.append(activations[-1] @ layer["weight"] + layer["bias"])
        if len(activations) <= len(weights):
            activations[-1] = np.tanh(activations[-1])
    return activations


def backward(weights: Weights, activations: list[Array], grad: Array, step: Any) -> None:
    """Computes the gradients from the last layer to the first, and gives each to the step as soon as it is complete.

    Args:
        activations: what `forward` returned.
        grad: the gradient of the logits.
    """
    for number in reversed(range(len(weights))):
        inputs = activations[number]
        # step.place is the gradient's own place in the buffer that is sent: computing into it saves a copy.
        np.matmul(inputs.T, grad, out=step.place(f"layer{number}/weight"))
        step.ready(f"layer{number}/weight")
        step.ready(f"layer{number}/bias", grad.sum(axis=0))
        if number:
            grad = grad @ weights[f"layer{number}"]["weight"].T * (1 - inputs * inputs)


def train(
    weights: Weights, sync: ferrorpc.GradientSynchronizer, data: Digits, group: ferrorpc.ProcessGroup, options: Any
) -> list[float]:
    """Trains for `options.epochs` by SGD with momentum. Returns the mean loss of each epoch over all ranks."""
    rule = ferrorpc.rules.SGD(options.rate)
    velocities = {name: {kind: np.zeros_like(array) for kind, array in layer.items()} for name, layer in weights.items()}
    curve, steps = [], 0
    for epoch in range(options.epochs):
        losses = []
        for rows in my_batches(len(data.train_labels), group, seed=options.seed * 1000 + epoch):
            steps += 1
            with sync.step() as step:
                activations = forward(weights, data.train_images[rows])
                loss, grad = softmax_cross_entropy(activations[-1], data.train_labels[rows])
                backward(weights, activations, grad, step)
            # When the block ends, step.grads are the means over all ranks, in a tree like the weights.
            for name, layer in weights.items():
                for kind, array in layer.items():
                    rule(array, step.grads[name][kind], [velocities[name][kind]], steps)
            losses.append(loss)
        curve.append(float(group.all_reduce(np.float64(np.mean(losses)), op="mean")))
    return curve


def accuracy(weights: Weights, images: Array, labels: NDArray[np.int64]) -> float:
    """The share of images that are classified correctly."""
    return float((forward(weights, images)[-1].argmax(axis=1) == labels).mean())


def set_up(group: ferrorpc.ProcessGroup, options: Any) -> tuple[Weights, ferrorpc.GradientSynchronizer]:
    """Makes the weights, which are the same on all ranks because the seed is, and the synchronizer of their gradients."""
    weights = initial_weights((64, 256, 10), options.seed)
    hook = HOOKS[options.hook]()
    sync = ferrorpc.GradientSynchronizer(weights, group, bucket_cap_mb=0.05, gradient_as_bucket_view=True, hook=hook)
    return weights, sync


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="train on handwritten digits, with a backward pass written by hand")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    parser.add_argument("--hook", choices=HOOKS, default="none", help="how gradients are compressed")
    parser.add_argument("--out", type=Path, default=Path("out/digits_stream.png"), help="where the loss curve goes")
    options = parser.parse_args()

    with ferrorpc.init_process_group() as group:
        if group.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)  # now, so that no training ends with its error
        data = load(group, options.seed)
        weights, sync = set_up(group, options)
        curve = train(weights, sync, data, group, options)
        sync.check_weights(weights)  # raises CollectiveMismatchError if any two ranks have different weights
        if group.rank == 0:
            reached = accuracy(weights, data.test_images, data.test_labels)
            plot(curve, reached, group.size, options.out)
            print(f"test accuracy {reached:.3f}")
            print(f"sent {sync.sent_bytes / 1e6:.2f} MB of gradients per rank, hook: {options.hook}")
            print(f"identical weights on {group.size} ranks")
            print(f"loss curve: {options.out}")


if __name__ == "__main__":
    main()
