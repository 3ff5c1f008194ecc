"""One rank of one system in benchmarks.ddp: trains as the driver asks, and reports the time it took.

    python -m benchmarks.ddp_worker SYSTEM MODEL [--rows N] [--bucket-mb N] [--bare [--device-ms N]]

For each turn it reads the number of steps from a line of standard input, and writes the times as a line of JSON. Rank and world
size come from torchrun's environment variables. Only one thread computes; all other threads are for communication.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ferrorpc

# Import ferrorpc first: it sets environment variables that gRPC reads when it is imported.
# isort: split
import torch
from torch import nn

ALONE, TORCH = "alone", "torch"
ROWS = {"mlp": 64, "transformer": 4}
LETTERS, LENGTH, WIDTH, LAYERS = 256, 64, 320, 8


class Characters(nn.Module):
    """A transformer of 10 million parameters that predicts the next of LETTERS letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 5, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.guess = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: (batch, LENGTH) letters. Returns (batch, LETTERS, LENGTH)."""
        guesses: torch.Tensor = self.guess(self.layers(self.letters(text) + self.places, mask=self.mask, is_causal=True))
        return guesses.transpose(1, 2)


def model_of(name: str) -> nn.Module:
    """The model with this name: the transformer, or a perceptron of 30 million parameters."""
    torch.manual_seed(0)
    if name == "transformer":
        return Characters()
    return nn.Sequential(
        nn.Linear(1024, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


class Bare(nn.Module):
    """A model's parameters with almost no computation: every parameter gets a gradient.

    Args:
        device_seconds: how long a step waits, to simulate a device that computes while the processors are free: a third of it
            in the forward pass, the rest in the backward pass, for each parameter in proportion to its elements.
    """

    def __init__(self, model: nn.Module, device_seconds: float = 0.0) -> None:
        super().__init__()
        self.model = model
        elements = sum(each.numel() for each in model.parameters())
        self._waits = [device_seconds * each.numel() / elements for each in model.parameters()] if device_seconds else []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (batch, ...), of which only the length matters. Returns (batch, 2), with two equal columns."""
        firsts = (each.reshape(-1)[0] for each in self.model.parameters())
        if not self._waits:
            return torch.stack(list(firsts)).sum().expand(len(rows), 2)
        total = torch.zeros(())
        # Each parameter is read just before it is added. Autograd goes back in this order, so gradients come one after another.
        for first, seconds in zip(firsts, self._waits, strict=True):
            total = OnDevice.apply(total + first, seconds)
        return total.expand(len(rows), 2)


class OnDevice(torch.autograd.Function):
    """The identity with a wait: a third of the seconds forward, the rest backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, None


def batch_of(name: str, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's inputs and targets, the same in every step."""
    random = torch.Generator().manual_seed(rank)
    if name == "transformer":
        text = torch.randint(LETTERS, (rows, LENGTH + 1), generator=random)
        return text[:, :-1], text[:, 1:]
    return torch.randn(rows, 1024, generator=random), torch.randint(10, (rows,), generator=random)


class Trainer:
    """Takes training steps: forward, backward, and an SGD update."""

    def __init__(
        self,
        wrapped: Callable[[torch.Tensor], torch.Tensor],
        model: nn.Module,
        batch: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._forward = wrapped
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._inputs, self._targets = batch
        self.gradient_bytes = sum(each.numel() * each.element_size() for each in model.parameters())

    def step(self) -> None:
        """Takes one step."""
        self._optimizer.zero_grad()
        self._loss(self._forward(self._inputs), self._targets).backward()
        self._optimizer.step()

    def turn(self, steps: int) -> dict[str, Any]:
        """Takes so many steps. Returns the seconds of each, and the processor seconds of all threads."""
        seconds = []
        cpu = time.process_time()
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}


def joined(
    system: str, rank: int, bucket_mb: float
) -> tuple[AbstractContextManager[Any], Callable[[nn.Module], Callable[..., torch.Tensor]]]:
    """Joins the system's world. Returns a context manager that leaves it, and a function that wraps a model."""
    if system == ALONE:
        return nullcontext(), lambda model: model
    if system == TORCH:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
        return nullcontext(), lambda model: nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
    from ferrorpc.torch import DistributedDataParallel

    group = ferrorpc.init_process_group()
    return group, lambda model: DistributedDataParallel(model, group, bucket_mb)


def held_bytes() -> int:
    """Memory of this process; shared memory counts in proportion (PSS)."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel reports no proportional set size")


def main() -> None:
    """Takes turns until standard input ends."""
    parser = argparse.ArgumentParser(description="One rank of one system, as benchmarks.ddp starts it.")
    parser.add_argument("system")
    parser.add_argument("model", choices=list(ROWS))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--device-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    world, wrap = joined(arguments.system, rank, arguments.bucket_mb)
    with world:
        model = model_of(arguments.model)
        inputs, targets = batch_of(arguments.model, rank, arguments.rows or ROWS[arguments.model])
        if arguments.bare:
            bare = Bare(model, arguments.device_ms / 1000)
            model, inputs, targets = bare, inputs[:1], torch.zeros(1, dtype=torch.long)
        before = held_bytes()
        trainer = Trainer(wrap(model), model, (inputs, targets))
        print(json.dumps({"gradient_bytes": trainer.gradient_bytes}), flush=True)
        for line in sys.stdin:
            taken = trainer.turn(int(line))
            print(json.dumps(taken | {"added_bytes": held_bytes() - before}), flush=True)
    os._exit(0)  # without waiting for torch's threads


if __name__ == "__main__":
    main()
