"""Data-parallel training of a small transformer in PyTorch, which learns to write Python.

    ferrorpc run -n 2 examples/characters_torch.py                     needs the extras `torch` and `examples`
    ferrorpc run -n 2 examples/characters_torch.py --device gpu        needs CuPy, too

The text is the source code of Python's standard library, so there is nothing to download. Every process has the whole model and
trains on pieces of text of its own. `ferrorpc.torch.DistributedDataParallel` averages gradients while the backward pass still
runs. At the end the ranks compare their weights, and rank 0 lets the model write a few lines and draws the loss curve.

With `--device gpu` the model is on a GPU: on one of its own for each rank, if there are enough.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import ferrorpc

# Import ferrorpc first: it sets environment variables that gRPC reads when it is imported.
# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ferrorpc.torch import DistributedDataParallel

TEXT_BYTES = 2_000_000
CHARACTERS = 128
CONTEXT = 64
ROWS_PER_RANK = 16
TEST_SHARE = 0.05
TEST_PIECES = 64


class CharacterModel(nn.Module):
    """A transformer that predicts each next character of a text from those before it."""

    mask: torch.Tensor

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, length) characters, length up to CONTEXT -> logits, (batch, length, CHARACTERS)."""
        length = text.shape[1]
        inputs = self.embedding(text) + self.positions[:length]
        outputs: torch.Tensor = self.head(self.layers(inputs, mask=self.mask[:length, :length], is_causal=True))
        return outputs


def device_of(device: str) -> torch.device:
    """The device for the model: the host for "cpu", this rank's GPU for "gpu". Exits if there is no GPU."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device gpu needs a GPU that torch can use; try: --device cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.init()  # backend "auto" then looks for GPUs
    return torch.device("cuda")


def source_text(group: ferrorpc.ProcessGroup) -> torch.Tensor:
    """The beginning of the standard library's source, its modules in alphabetical order. Rank 0 reads it and broadcasts it."""
    characters: NDArray[np.uint8] | None = None
    if group.rank == 0:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:TEXT_BYTES]
        characters = np.frombuffer(text, np.uint8) % CHARACTERS
    return torch.from_numpy(group.broadcast(characters, root=0)).long()


def random_pieces(text: torch.Tensor, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces from random positions of the text, and for each character the one that follows; both are (count, CONTEXT)."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=random)
    positions = starts + torch.arange(CONTEXT)
    return text[positions], text[positions + 1]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean cross entropy, in nats per character."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(
    ddp: DistributedDataParallel, text: torch.Tensor, group: ferrorpc.ProcessGroup, steps: int, rate: float
) -> list[float]:
    """Trains with AdamW and a one-cycle learning rate. Returns the loss of each step on this rank's pieces."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    random = torch.Generator().manual_seed(1 + group.rank)
    curve = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(ddp, random_pieces(text, ROWS_PER_RANK, random))
        loss.backward()  # afterwards every gradient is the mean over all ranks
        optimizer.step()
        schedule.step()
        curve.append(loss.item())
        if group.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {np.mean(curve[-50:]):.3f}", flush=True)
    return curve


@torch.no_grad()
def generate(model: nn.Module, prompt: str, count: int) -> str:
    """Continues a text by so many characters, each drawn from the model's prediction."""
    random = torch.Generator().manual_seed(0)
    text, device = torch.tensor([list(prompt.encode())]), next(model.parameters()).device
    for _ in range(count):
        probabilities = torch.softmax(model(text[:, -CONTEXT:].to(device))[:, -1] / 0.7, dim=-1).cpu()
        text = torch.cat([text, torch.multinomial(probabilities, 1, generator=random)], dim=1)
    return bytes(text[0].tolist()).decode("ascii")


def plot(curve: list[float], test_loss: float, ranks: int, path: Path) -> None:
    """Draws the loss curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(curve) + 1), curve, color="tab:blue", linewidth=1.2, label="mean of the ranks' batches")
    axes.axhline(test_loss, color="tab:orange", linestyle="--", label=f"test text, at the end: {test_loss:.2f}")
    axes.axhline(math.log(CHARACTERS), color="gray", linestyle=":", label="uniform guessing")
    axes.set(xlabel="step", ylabel="nats per character", ylim=(0, None))
    axes.set_title(f"a transformer learns the standard library's source on {ranks} processes")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="train a small transformer on Python's own source text, data-parallel")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate of the schedule")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the model is: gpu needs CuPy, too")
    parser.add_argument("--out", type=Path, default=Path("out/characters_loss.png"), help="where the loss curve goes")
    options = parser.parse_args()

    torch.set_num_threads(1)  # all processes share this machine's processors
    torch.manual_seed(0)
    device = device_of(options.device)
    with ferrorpc.init_process_group() as group:
        if group.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)  # now, so that no training ends with its error
        text = source_text(group).to(device)
        cut = int(len(text) * (1 - TEST_SHARE))
        ddp = DistributedDataParallel(CharacterModel().to(device), group)
        mine = train(ddp, text[:cut], group, options.steps, options.rate)
        curve = group.all_reduce(np.asarray(mine), op="mean")
        ddp.check_weights()  # raises CollectiveMismatchError if any two ranks have different weights
        if group.rank == 0:
            with torch.no_grad():
                test = random_pieces(text[cut:], TEST_PIECES, torch.Generator().manual_seed(0))
                test_loss = loss_of(ddp.module, test).item()
            plot(list(curve), test_loss, group.size, options.out)
            print(generate(ddp.module, "def ", 200))
            print(f"test loss {test_loss:.3f} nats per character")
            print(f"identical weights on {group.size} ranks")
            print(f"loss curve: {options.out}")


if __name__ == "__main__":
    main()
