"""Data-parallel training without modules: `ferrorpc run -n 2 examples/digits_stream.py`.

The network is a dict of arrays, its backward pass a loop that is written by hand. As soon as the loop has a layer's gradients
it hands them to `step.ready`, and they travel while it computes those of the layer before. With `--hook int8` or
`--hook powersgd` they travel as fewer bytes.
"""

from __future__ import annotations

import argparse
import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from digits_ddp import Digits, load, my_batches, plot
from digits_model import Array, softmax_cross_entropy
from numpy.typing import NDArray

import ferrorpc

HOOKS: Final = {
    "none": lambda: None,
    "int8": lambda: ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.Compress("int8")),
    "powersgd": lambda: ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.PowerSGD(2)),
}

Weights = dict[str, dict[str, Array]]
"""Layer -> "weight" of shape (inputs, outputs) and "bias" of shape (outputs,)."""


def initial(widths: tuple[int, ...], seed: int) -> Weights:
    """Weights of linear layers with tanh between them."""
    random = np.random.default_rng(seed)
    weights = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = np.sqrt(6 / (inputs + outputs))
        drawn = random.uniform(-bound, bound, (inputs, outputs)).astype(np.float32)
        weights[f"layer{number}"] = {"weight": drawn, "bias": np.zeros(outputs, np.float32)}
    return weights


def forward(weights: Weights, images: Array) -> list[Array]:
    """The inputs of each layer, and the logits."""
    seen = [images]
    for layer in weights.values():
        seen.append(seen[-1] @ layer["weight"] + layer["bias"])
        if len(seen) <= len(weights):
            seen[-1] = np.tanh(seen[-1])
    return seen


def backward(weights: Weights, seen: list[Array], grad: Array, step: Any) -> None:
    """From the last layer to the first; every gradient leaves as soon as it is there.

    Args:
        grad: the loss's gradient at the logits.
    """
    for number in reversed(range(len(weights))):
        inputs = seen[number]
        np.matmul(inputs.T, grad, out=step.place(f"layer{number}/weight"))  # computed where it will travel
        step.ready(f"layer{number}/weight")
        step.ready(f"layer{number}/bias", grad.sum(axis=0))
        if number:
            grad = grad @ weights[f"layer{number}"]["weight"].T * (1 - inputs * inputs)


def train(
    weights: Weights, sync: ferrorpc.GradientSynchronizer, data: Digits, group: ferrorpc.ProcessGroup, options: Any
) -> list[float]:
    """Trains for `options.epochs` by SGD with momentum. Returns each epoch's mean loss over all ranks."""
    rule = ferrorpc.rules.SGD(options.rate)
    velocities = {name: {kind: np.zeros_like(array) for kind, array in layer.items()} for name, layer in weights.items()}
    curve, steps = [], 0
    for epoch in range(options.epochs):
        losses = []
        for rows in my_batches(len(data.train_labels), group, seed=options.seed * 1000 + epoch):
            steps += 1
            with sync.step() as step:
                seen = forward(weights, data.train_images[rows])
                loss, grad = softmax_cross_entropy(seen[-1], data.train_labels[rows])
                backward(weights, seen, grad, step)
            for name, layer in weights.items():
                for kind, array in layer.items():
                    rule(array, step.grads[name][kind], [velocities[name][kind]], steps)
            losses.append(loss)
        curve.append(float(group.all_reduce(np.float64(np.mean(losses)), op="mean")))
    return curve


def accuracy(weights: Weights, images: Array, labels: NDArray[np.int64]) -> float:
    """Share of images told right."""
    return float((forward(weights, images)[-1].argmax(axis=1) == labels).mean())


def digest(weights: Weights) -> Array:
    """SHA-256 over the bytes of all weights."""
    arrays = [array.tobytes() for layer in weights.values() for array in layer.values()]
    return np.frombuffer(hashlib.sha256(b"".join(arrays)).digest(), np.uint8)


def prepared(group: ferrorpc.ProcessGroup, options: Any) -> tuple[Weights, ferrorpc.GradientSynchronizer]:
    """Weights as the seed fixes them, the same on all ranks, and what averages their gradients."""
    weights = initial((64, 256, 10), options.seed)
    hook = HOOKS[options.hook]()
    sync = ferrorpc.GradientSynchronizer(weights, group, bucket_cap_mb=0.05, gradient_as_bucket_view=True, hook=hook)
    return weights, sync


def main() -> None:
    """One rank's part."""
    parser = argparse.ArgumentParser(description="train on handwritten digits, with a backward pass written by hand")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    parser.add_argument("--hook", choices=HOOKS, default="none", help="what gradients travel as")
    parser.add_argument("--out", type=Path, default=Path("out/digits_stream.png"), help="where the loss curve goes")
    options = parser.parse_args()

    with ferrorpc.init_process_group() as group:
        data = load(group, options.seed)
        weights, sync = prepared(group, options)
        curve = train(weights, sync, data, group, options)
        hashes = group.all_gather(digest(weights))
        different = [rank for rank, other in enumerate(hashes) if not np.array_equal(other, hashes[0])]
        if different:
            raise SystemExit(f"ranks {different} hold other weights than rank 0")
        if group.rank == 0:
            reached = accuracy(weights, data.test_images, data.test_labels)
            plot(curve, reached, group.size, options.out)
            print(f"test accuracy {reached:.3f}")
            print(f"sent {sync.sent_bytes / 1e6:.2f} MB of gradients per rank as {options.hook}")
            print(f"identical weights on {group.size} ranks")
            print(f"loss curve: {options.out}")


if __name__ == "__main__":
    main()
