"""Data-parallel training with JAX and optax.

    ferrorpc run -n 2 examples/digits_jax.py        needs jax, optax and scikit-learn

`jax.grad` gives a tree of gradients, `ferrorpc.GradientSynchronizer` averages it over all processes, and optax updates the
weights. Gradients and update are two compiled functions; the average is taken between them, outside of what JAX traces.
"""

from __future__ import annotations

import argparse
from typing import Any

import ferrorpc

# Import ferrorpc first: it sets environment variables that gRPC reads when it is imported.
# isort: split
import jax
import jax.numpy as jnp
import optax
from digits_ddp import load, my_batches, positive

WIDTH = 64


def initial_weights(seed: int) -> dict[str, Any]:
    """The weights of two linear layers; the same on all ranks, because the seed is."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"weight": jax.random.normal(first, (64, WIDTH)) / 8, "bias": jnp.zeros(WIDTH)},
        "output": {"weight": jax.random.normal(second, (WIDTH, 10)) / WIDTH**0.5, "bias": jnp.zeros(10)},
    }


def logits(weights: Any, images: Any) -> Any:
    """(batch, 64) -> (batch, 10)."""
    hidden = jnp.tanh(images @ weights["hidden"]["weight"] + weights["hidden"]["bias"])
    return hidden @ weights["output"]["weight"] + weights["output"]["bias"]


def loss(weights: Any, images: Any, labels: Any) -> Any:
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, images), labels).mean()


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="train on handwritten digits with JAX, data-parallel")
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    options = parser.parse_args()

    optimizer = optax.adam(options.rate)
    gradients = jax.jit(jax.grad(loss))

    @jax.jit
    def updated(weights: Any, state: Any, means: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(means, state, weights)
        return optax.apply_updates(weights, updates), state

    with ferrorpc.init_process_group() as group:
        data = load(group, options.seed)
        weights = initial_weights(options.seed)
        state = optimizer.init(weights)
        sync = ferrorpc.GradientSynchronizer(weights, group)
        for epoch in range(options.epochs):
            for rows in my_batches(len(data.train_labels), group, seed=options.seed * 1000 + epoch):
                means = sync(gradients(weights, data.train_images[rows], data.train_labels[rows]))
                weights, state = updated(weights, state, means)
        sync.check_weights(weights)  # raises CollectiveMismatchError if any two ranks have different weights
        if group.rank == 0:
            reached = float((logits(weights, data.test_images).argmax(axis=1) == data.test_labels).mean())
            print(f"test accuracy {reached:.3f}")
            print(f"identical weights on {group.size} ranks")


if __name__ == "__main__":
    main()
