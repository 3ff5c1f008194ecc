"""Data-parallel training of a small network on handwritten digits, with DistributedDataParallel.

    ferrorpc run -n 4 examples/digits_ddp.py                     ferrorpc demo does the same
    ferrorpc run -n 2 examples/digits_ddp.py --device gpu        with CuPy arrays

The data are 1,797 images of 8 x 8 pixels that come with scikit-learn. Every process has the whole network and trains on its
share of each batch. After each backward pass `sync_gradients` replaces the gradients by their mean over all processes. So all
processes take the same optimizer step, and their weights stay identical bit for bit; the end of the program checks that.
"""

from __future__ import annotations

import argparse
import threading
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
    """Images are (count, 64) values between 0 and 1; labels are (count,) digits."""

    train_images: Array
    train_labels: NDArray[np.int64]
    test_images: Array
    test_labels: NDArray[np.int64]


def load(group: ferrorpc.ProcessGroup, seed: int) -> Digits:
    """The digits, shuffled by the seed. Rank 0 loads them and broadcasts them to the other ranks."""
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
    """This rank's rows of each batch of one epoch.

    All ranks have equally many rows of a batch, so the mean of the ranks' mean gradients is that of the whole batch.
    """
    order = np.random.default_rng(seed).permutation(count)
    batch = ROWS_PER_RANK * group.size
    if batch > count:
        raise SystemExit(f"{count} images are too few for {group.size} ranks with {ROWS_PER_RANK} of every batch")
    for start in range(0, count - batch + 1, batch):
        yield order[start : start + batch][group.rank :: group.size]


def array_module(device: str) -> Any:
    """numpy for "cpu", cupy for "gpu". Exits if CuPy or a GPU is missing."""
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
    """Trains for `options.epochs`. Returns the mean loss of each epoch over all ranks."""
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
            ddp.sync_gradients()  # from here on all ranks have the same gradients
            optimizer.step()
            losses.append(loss)
        curve.append(float(group.all_reduce(np.float64(np.mean(losses)), op="mean")))
        epochs.set_postfix(loss=f"{curve[-1]:.3f}")
    return curve


def accuracy(ddp: ferrorpc.DistributedDataParallel, data: Digits, group: ferrorpc.ProcessGroup, xp: Any = np) -> float:
    """The share of test images that are classified correctly. Each rank classifies a part of them."""
    ddp.module.eval()
    mine = slice(group.rank, None, group.size)
    predicted = ddp(xp.asarray(data.test_images[mine])).argmax(axis=1)
    correct = int((predicted == xp.asarray(data.test_labels[mine])).sum())
    return int(group.all_reduce(np.int64(correct))) / len(data.test_labels)


def plot(curve: list[float], reached: float, ranks: int, path: Path) -> None:
    """Draws the loss curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(range(1, len(curve) + 1), curve, color="tab:blue", linewidth=2)
    axes.set(xlabel="epoch", ylabel="training loss (mean over ranks)")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_title(f"handwritten digits on {ranks} processes: test accuracy {reached:.3f}")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def positive(text: str) -> int:
    """A whole number of at least 1, as an argument of the command line."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="train a small network on handwritten digits, data-parallel")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the network is: gpu needs CuPy")
    parser.add_argument("--out", type=Path, default=Path("out/digits_loss.png"), help="where the loss curve goes")
    options = parser.parse_args()
    xp = array_module(options.device)
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is shared with other processes: Python 3.14 warns of it after Ctrl-C

    with ferrorpc.init_process_group() as group:
        if group.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)  # now, so that no training ends with its error
        data = load(group, options.seed)
        model = DigitsNet((data.train_images.shape[1], 48, 10), seed=options.seed + group.rank, xp=xp)
        ddp = ferrorpc.DistributedDataParallel(model, group)
        started = time.monotonic()
        curve = train(ddp, data, group, options, xp)
        seconds = time.monotonic() - started
        reached = accuracy(ddp, data, group, xp)
        ddp.check_weights()  # raises CollectiveMismatchError if any two ranks have different weights
        if group.rank == 0:
            nbytes = sum(parameter.data.nbytes for parameter in model.parameters())
            print(f"trained {options.epochs} epochs in {seconds:.1f} s, backend {group.backend}")
            print(f"gradients travel as {group.explain('all_reduce', nbytes).splitlines()[0]}")
            print(f"test accuracy {reached:.3f}")
            print(f"identical weights on {group.size} ranks")
        group.barrier()  # no rank exits early: if one is lost until now, all still run and can start again together
    if group.rank == 0:  # the other ranks need not wait for it
        plot(curve, reached, group.size, options.out)
        print(f"loss curve: {options.out}")


if __name__ == "__main__":
    main()
