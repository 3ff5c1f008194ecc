"""Pipeline parallelism in PyTorch, alone or with data parallelism: the transformer of characters_torch.py, cut into stages.

    ferrorpc run -n 2 examples/pipeline_characters.py                        one pipeline of two stages
    ferrorpc run -n 4 examples/pipeline_characters.py --replicas 2           two such pipelines
    ferrorpc run -n 2 examples/pipeline_characters.py --schedule zbv         another schedule

With `--replicas 2` each pipeline trains on text of its own, and gradients are averaged between the pipelines. A stage's
gradients are sent as soon as they are complete, while other stages still compute. At the end the replicas compare their
weights. The last step is drawn as it was recorded, above the schedule's simulation at the same costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ferrorpc

# Import ferrorpc first: it sets environment variables that gRPC reads when it is imported.
# isort: split
import numpy as np
import torch
from characters_torch import CHARACTERS, CONTEXT, TEST_PIECES, TEST_SHARE, CharacterModel, random_pieces, source_text
from torch import nn

from ferrorpc.torch import Stage, cut, with_gradient

LAYERS = 6
ROWS = 32
"""Pieces of text in the batch of each replica."""


class Embedding(nn.Module):
    """The part of the model before its layers."""

    def __init__(self, model: CharacterModel) -> None:
        super().__init__()
        self.embedding, self.positions = model.embedding, model.positions

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, length) characters -> (batch, length, width)."""
        inputs: torch.Tensor = self.embedding(text) + self.positions[: text.shape[1]]
        return inputs


class Layer(nn.Module):
    """One layer of the model, with its mask."""

    mask: torch.Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        length = x.shape[1]
        outputs: torch.Tensor = self.layer(x, src_mask=self.mask[:length, :length], is_causal=True)
        return outputs


def sequential(model: CharacterModel) -> nn.Sequential:
    """The model's modules as a Sequential, which can be cut between any two of them."""
    norm = model.layers.norm
    assert norm is not None
    return nn.Sequential(Embedding(model), *(Layer(each) for each in model.layers.layers), nn.Sequential(norm, model.head))


def my_stages(schedule: ferrorpc.schedules.Schedule, rank: int) -> list[Stage]:
    """This rank's stages of the model.

    Every rank makes the whole model, with the same seed, and keeps its pieces. `cut` balances the number of weights. Nearly all
    of them are in the layers, which are equal, so the pieces take about the same time.
    """
    torch.manual_seed(0)
    model = sequential(CharacterModel(layers=LAYERS))
    if schedule.virtual_stages > len(model):
        raise SystemExit(f"{len(model)} modules are too few for {schedule.virtual_stages} stages")
    pieces = cut(model, schedule.virtual_stages)
    return [Stage(pieces[number]) for number in schedule.pieces(rank)]


@with_gradient
def loss_fn(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, in nats per character."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class Trainer:
    """Trains one replica's pipeline, and averages gradients with the other replicas.

    Args:
        stages: this rank's.
        mesh: dimension "dp" is the replicas, "pp" the stages of a replica.
        schedule: of each pipeline.
        steps: the number of training steps.
        rate: the highest learning rate.
    """

    def __init__(
        self, stages: list[Stage], mesh: ferrorpc.Mesh, schedule: ferrorpc.schedules.Schedule, steps: int, rate: float
    ) -> None:
        self.pipe = ferrorpc.Pipeline(stages, mesh["pp"], schedule)
        self._weights = dict(self.pipe.named_parameters())
        self._sync = ferrorpc.GradientSynchronizer(self._values(), mesh["dp"])
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=rate)
        self._rates = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, rate, total_steps=steps)

    def step(self, text: torch.Tensor, following: torch.Tensor) -> float | None:
        """Trains on one batch. Returns its loss on the rank of the last stage, None elsewhere."""
        self._optimizer.zero_grad()
        with self._sync.step() as means:
            loss = self.pipe.step(text, following, loss_fn, on_gradients=self._ready(means))
        for name, mean in means.grads.items():
            self._weights[name].grad = mean
        self._optimizer.step()
        self._rates.step()
        return None if loss is None else float(loss)

    def check_replicas(self) -> None:
        """Raises CollectiveMismatchError if replicas have different weights."""
        self._sync.check_weights(self._values())

    def _ready(self, means: Any) -> Callable[[int], None]:
        """A function that starts to average the gradients of a piece, for the pipeline to call once they are complete."""

        def ready(piece: int) -> None:
            for name, parameter in self.pipe.named_parameters(piece):
                means.ready(name, parameter.grad)

        return ready

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: each.data for name, each in self._weights.items()}


def train(trainer: Trainer, text: torch.Tensor, replica: int, steps: int) -> list[float]:
    """Returns the loss of each step on the rank of the last stage, an empty list elsewhere."""
    random = torch.Generator().manual_seed(1 + replica)
    curve = []
    for step in range(steps):
        loss = trainer.step(*random_pieces(text, ROWS, random))
        if loss is not None:
            curve.append(loss)
            if replica == 0 and (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {np.mean(curve[-50:]):.3f}", flush=True)
    return curve


def draw(trainer: Trainer, path: Path, write_file: bool) -> str:
    """Draws the last step, recorded above simulated. Every rank calls it; one writes the file. Returns a summary."""
    recorded = trainer.pipe.recorded()
    schedule = trainer.pipe.schedule
    simulated = schedule.simulate(**recorded.costs(schedule))
    if write_file:
        write = recorded.to_svg if path.suffix == ".svg" else recorded.to_png
        write(path, beside=simulated)
    return f"idle {recorded.bubble_fraction:.1%} as recorded, {simulated.bubble_fraction:.1%} as simulated"


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="train a small transformer on Python's own source text, cut into stages")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate of the schedule")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines side by side; the processes are shared among them")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(ferrorpc.schedules.NAMED)}")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="stages of each process, where the schedule leaves it open")
    parser.add_argument("--out", type=Path, default=Path("out/pipeline_characters.png"), help="the picture, .png or .svg")
    options = parser.parse_args()

    torch.set_num_threads(1)  # all processes share this machine's processors
    with ferrorpc.init_process_group() as group:
        if options.replicas < 1 or group.size % options.replicas:
            raise SystemExit(f"{group.size} processes cannot be shared among {options.replicas} replicas")
        mesh = ferrorpc.Mesh({"dp": options.replicas, "pp": group.size // options.replicas}, group)
        schedule = ferrorpc.schedules.named(options.schedule, mesh["pp"].size, options.microbatches, options.chunks)
        if group.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)  # now, so that no training ends with its error
        text = source_text(group)
        cut_at = int(len(text) * (1 - TEST_SHARE))
        trainer = Trainer(my_stages(schedule, mesh["pp"].rank), mesh, schedule, options.steps, options.rate)
        started = time.monotonic()
        curve = train(trainer, text[:cut_at], mesh["dp"].rank, options.steps)
        seconds = time.monotonic() - started
        trainer.check_replicas()
        summary = draw(trainer, options.out, write_file=group.rank == 0)
        test, following = random_pieces(text[cut_at:], TEST_PIECES, torch.Generator().manual_seed(0))
        logits = trainer.pipe.forward(test)
        if group.rank == 0:
            print(
                f"{schedule}, replicas: {options.replicas}; {options.steps} steps in {seconds:.1f} s, backend {group.backend}"
            )
            print(f"the last step: {summary}: {options.out}")
        if logits is not None and mesh["dp"].rank == 0:
            print(
                f"loss {curve[0]:.3f} at first, {np.mean(curve[-10:]):.3f} at last; uniform guessing {np.log(CHARACTERS):.3f}"
            )
            print(f"test loss {loss_fn(logits, following)[0].item():.3f} nats per character")
            print(f"replicas with identical weights: {options.replicas}")


if __name__ == "__main__":
    main()
