"""Data-parallel training on real data: `ferrorpc run -n 4 examples/digits_ddp.py`, or `ferrorpc demo`.

Every process holds the whole network and sees its own share of each batch of handwritten digits (1,797 images of 8 x 8
pixels that come with scikit-learn). After each backward pass `sync_gradients` makes the gradients the mean over all
processes, so every process takes the same step and the weights stay identical, to the last bit.

With `--device gpu` the network consists of CuPy arrays, and its gradients become means on the GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from digits_model import Array, DigitsNet, Momentum, softmax_cross_entropy
from numpy.typing import NDArray

import ferrorpc

ROWS_PER_RANK = 16
TEST_SHARE = 0.2


class Digits(NamedTuple):
    """The data: images as (count, 64) values in 0..1, labels as (count,) digits."""

    train_images: Array
    train_labels: NDArray[np.int64]
    test_images: Array
    test_labels: NDArray[np.int64]


def load(group: ferrorpc.ProcessGroup, seed: int) -> Digits:
    """The digits in an order that the seed fixes. Rank 0 reads them and gives them to the others."""
    images, labels = None, None
    if group.rank == 0:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    images, labels = group.broadcast(images, root=0), group.broadcast(labels, root=0)
    test = int(len(labels) * TEST_SHARE)
    return Digits(images[test:], labels[test:], images[:test], labels[:test])


def my_batches(count: int, group: ferrorpc.ProcessGroup, seed: int) -> Iterator[NDArray[np.int64]]:
    """This rank's rows of each batch of one epoch. Shares are of equal size, so the mean of means is the mean."""
    order = np.random.default_rng(seed).permutation(count)
    batch = ROWS_PER_RANK * group.size
    for start in range(0, count - batch + 1, batch):
        yield order[start : start + batch][group.rank :: group.size]


def array_module(device: str) -> Any:
    """numpy for "cpu", cupy for "gpu". Ends the program where that cannot be used."""
    if device == "cpu":
        return np
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError as problem:
        raise SystemExit(f"--device gpu needs CuPy: {problem}; try: pip install 'ferrorpc[gpu]'") from None
    except cupy.cuda.runtime.CUDARuntimeError as problem:
        raise SystemExit(f"--device gpu needs a GPU that CuPy can use: {problem}; try: --device cpu") from None
    return cupy


def train(
    ddp: ferrorpc.DistributedDataParallel, data: Digits, group: ferrorpc.ProcessGroup, options: Any, xp: Any = np
) -> list[float]:
    """Trains for `options.epochs`. Returns each epoch's mean loss over all ranks."""
    from tqdm import tqdm

    optimizer = Momentum(ddp.module.parameters(), rate=options.rate, xp=xp)
    curve: list[float] = []
    epochs = tqdm(range(options.epochs), desc="training", unit="epoch", disable=group.rank != 0)
    for epoch in epochs:
        losses = []
        for rows in my_batches(len(data.train_labels), group, seed=options.seed * 1000 + epoch):
            logits = ddp(xp.asarray(data.train_images[rows]))
            loss, grad = softmax_cross_entropy(logits, xp.asarray(data.train_labels[rows]), xp)
            ddp.module.backward(grad)
            ddp.sync_gradients()
            optimizer.step()
            losses.append(loss)
        curve.append(float(group.all_reduce(np.float64(np.mean(losses)), op="mean")))
        epochs.set_postfix(loss=f"{curve[-1]:.3f}")
    return curve


def accuracy(ddp: ferrorpc.DistributedDataParallel, data: Digits, group: ferrorpc.ProcessGroup, xp: Any = np) -> float:
    """Share of test images told right. Each rank looks at its share of them."""
    ddp.module.eval()
    mine = slice(group.rank, None, group.size)
    told = ddp(xp.asarray(data.test_images[mine])).argmax(axis=1)
    right = int((told == xp.asarray(data.test_labels[mine])).sum())
    return int(group.all_reduce(np.int64(right))) / len(data.test_labels)


def weights_hash(ddp: ferrorpc.DistributedDataParallel) -> bytes:
    """SHA-256 over the bytes of all weights."""
    digest = hashlib.sha256()
    for name, parameter in ddp.module.named_parameters():
        digest.update(name.encode() + parameter.data.tobytes())
    return digest.digest()


def plot(curve: list[float], reached: float, ranks: int, path: Path) -> None:
    """Writes the loss curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(range(1, len(curve) + 1), curve, color="tab:blue", linewidth=2)
    axes.set(xlabel="epoch", ylabel="training loss (mean over ranks)")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_title(f"handwritten digits on {ranks} processes: test accuracy {reached:.3f}")
    axes.grid(visible=True, which="both", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank's part."""
    parser = argparse.ArgumentParser(description="train a small network on handwritten digits, data-parallel")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the network is: gpu needs CuPy")
    parser.add_argument("--out", type=Path, default=Path("out/digits_loss.png"), help="where the loss curve goes")
    options = parser.parse_args()
    xp = array_module(options.device)

    with ferrorpc.init_process_group() as group:
        data = load(group, options.seed)
        model = DigitsNet((data.train_images.shape[1], 48, 10), seed=options.seed + group.rank, xp=xp)
        ddp = ferrorpc.DistributedDataParallel(model, group)
        started = time.monotonic()
        curve = train(ddp, data, group, options, xp)
        seconds = time.monotonic() - started
        reached = accuracy(ddp, data, group, xp)
        hashes = group.all_gather(np.frombuffer(weights_hash(ddp), np.uint8))
        different = [rank for rank, other in enumerate(hashes) if not np.array_equal(other, hashes[0])]
        if different:
            raise SystemExit(f"ranks {different} hold other weights than rank 0")
        if group.rank == 0:
            plot(curve, reached, group.size, options.out)
            nbytes = sum(parameter.data.nbytes for parameter in model.parameters())
            print(f"trained {options.epochs} epochs in {seconds:.1f} s, backend {group.backend}")
            print(f"gradients travel as {group.explain('all_reduce', nbytes).splitlines()[0]}")
            print(f"test accuracy {reached:.3f}")
            print(f"identical weights on {group.size} ranks")
            print(f"loss curve: {options.out}")
        group.barrier()  # all end together: whoever is lost before can start again, for the others still do too


if __name__ == "__main__":
    main()
