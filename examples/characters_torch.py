"""A small transformer in PyTorch learns to write Python: `ferrorpc run -n 2 examples/characters_torch.py`.

Its text is the standard library's own source, which lies on every machine that can run it. Every process has the whole model
and draws its own pieces of the text; gradients are averaged while the backward pass still runs. At the end the ranks compare
their weights, and rank 0 writes a few lines and draws the loss.

With `--device gpu` each rank's model is on a GPU (its own, where there are as many), and its gradients become means there.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import ferrorpc

# ferrorpc comes first: it sets what gRPC reads when it is imported.
# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ferrorpc.torch import DistributedDataParallel

TEXT_BYTES = 2_000_000
LETTERS = 128
CONTEXT = 64
ROWS_PER_RANK = 16
TEST_SHARE = 0.05
TEST_PIECES = 64


class Characters(nn.Module):
    """Guesses each next letter of a text from the letters before it."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.guess = nn.Linear(width, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: (batch, length) letters, length up to CONTEXT. Returns logits, (batch, length, LETTERS)."""
        length = text.shape[1]
        inputs = self.letters(text) + self.places[:length]
        outputs: torch.Tensor = self.guess(self.layers(inputs, mask=self.mask[:length, :length], is_causal=True))
        return outputs


def place(device: str) -> torch.device:
    """Where the model is to be: the host, or this rank's GPU."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device gpu needs a GPU that torch can use; try: --device cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.init()  # so that backend "auto" looks for GPUs
    return torch.device("cuda")


def source_text(group: ferrorpc.ProcessGroup) -> torch.Tensor:
    """The first megabytes of the standard library, its modules in order of their names. Rank 0 reads them for all."""
    letters: NDArray[np.uint8] | None = None
    if group.rank == 0:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:TEXT_BYTES]
        letters = np.frombuffer(text, np.uint8) % LETTERS
    return torch.from_numpy(group.broadcast(letters, root=0)).long()


def pieces(text: torch.Tensor, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces from anywhere in the text, and the letters that follow each of theirs: both (count, CONTEXT)."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=random)
    places = starts + torch.arange(CONTEXT)
    return text[places], text[places + 1]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy in nats a letter."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(
    ddp: DistributedDataParallel, text: torch.Tensor, group: ferrorpc.ProcessGroup, steps: int, rate: float
) -> list[float]:
    """Trains by AdamW on a one-cycle schedule. Returns each step's loss on this rank's pieces."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    random = torch.Generator().manual_seed(1 + group.rank)
    curve = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(ddp, pieces(text, ROWS_PER_RANK, random))
        loss.backward()
        optimizer.step()
        schedule.step()
        curve.append(loss.item())
        if group.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {np.mean(curve[-50:]):.3f}", flush=True)
    return curve


@torch.no_grad()
def written(model: nn.Module, beginning: str, count: int) -> str:
    """What the model writes on, letter by letter, by chance."""
    random = torch.Generator().manual_seed(0)
    text, where = torch.tensor([list(beginning.encode())]), next(model.parameters()).device
    for _ in range(count):
        chances = torch.softmax(model(text[:, -CONTEXT:].to(where))[:, -1] / 0.7, dim=-1).cpu()
        text = torch.cat([text, torch.multinomial(chances, 1, generator=random)], dim=1)
    return bytes(text[0].tolist()).decode("ascii")


def plot(curve: list[float], tested: float, ranks: int, path: Path) -> None:
    """Writes the loss curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(curve) + 1), curve, color="tab:blue", linewidth=1.2, label="mean of the ranks' batches")
    axes.axhline(tested, color="tab:orange", linestyle="--", label=f"text kept back, at the end: {tested:.2f}")
    axes.axhline(math.log(LETTERS), color="gray", linestyle=":", label="guessing blindly")
    axes.set(xlabel="step", ylabel="nats a letter", ylim=(0, None))
    axes.set_title(f"a transformer learns the standard library's source on {ranks} processes")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank's part."""
    parser = argparse.ArgumentParser(description="train a small transformer on Python's own source text, data-parallel")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate of the schedule")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the model is: gpu needs CuPy, too")
    parser.add_argument("--out", type=Path, default=Path("out/characters_loss.png"), help="where the loss curve goes")
    options = parser.parse_args()

    torch.set_num_threads(1)  # processes share the processors
    torch.manual_seed(0)
    device = place(options.device)
    with ferrorpc.init_process_group() as group:
        text = source_text(group).to(device)
        cut = int(len(text) * (1 - TEST_SHARE))
        ddp = DistributedDataParallel(Characters().to(device), group)
        mine = train(ddp, text[:cut], group, options.steps, options.rate)
        curve = group.all_reduce(np.asarray(mine), op="mean")
        ddp.check_weights()  # raises where ranks differ
        if group.rank == 0:
            with torch.no_grad():
                tested = loss_of(ddp.module, pieces(text[cut:], TEST_PIECES, torch.Generator().manual_seed(0))).item()
            plot(list(curve), tested, group.size, options.out)
            print(written(ddp.module, "def ", 200))
            print(f"test loss {tested:.3f} nats a letter")
            print(f"identical weights on {group.size} ranks")
            print(f"loss curve: {options.out}")


if __name__ == "__main__":
    main()
