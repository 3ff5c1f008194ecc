"""Elastic training: it continues while processes die and new ones join.

    ferrorpc run -n 4 --world-size 2:4 examples/digits_elastic.py

Kill one of its processes, and the others continue. Network and data are those of digits_ddp.py.

When a process is lost, every operation of the others raises PeerLostError. They catch it, call `group.reform()`, and get the
group of the next generation. New processes are let in at the end of an epoch. All ranks then continue from the state of the
rank that is furthest, so no optimizer step is lost; an interrupted epoch begins again, with the weights that it had reached.
SIGUSR1 to any of the processes ends the training after the current epoch.
"""

from __future__ import annotations

import argparse
import signal
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from digits_ddp import Digits, accuracy, load, my_batches, positive
from digits_model import DigitsNet, Momentum, softmax_cross_entropy

import ferrorpc


@dataclass
class Progress:
    """The state of the training in this process: model and optimizer, and the steps and epochs that they have done."""

    model: DigitsNet
    optimizer: Momentum
    epoch: int = 0
    step: int = 0

    def synchronize(self, ddp: ferrorpc.DistributedDataParallel, group: ferrorpc.ProcessGroup) -> None:
        """Gives every rank the state of the rank that is furthest. Collective."""
        reached = [tuple(both) for both in group.all_gather(np.array([self.step, self.epoch]))]
        furthest = max(range(group.size), key=lambda rank: reached[rank])
        ddp.broadcast_parameters(root=furthest)
        for velocity in self.optimizer.velocities:
            group.broadcast(velocity, root=furthest, out=velocity)
        self.step, self.epoch = (int(number) for number in reached[furthest])


def train(progress: Progress, group: ferrorpc.ProcessGroup, options: Any, stop: threading.Event) -> bool:
    """Trains with the members of this generation.

    Returns:
        True when the training is finished, False when new members wait to be let in.

    Raises:
        PeerLostError: a member was lost; the others can continue.
    """
    data = load(group, options.seed)
    ddp = ferrorpc.DistributedDataParallel(progress.model, group, init_sync=False)
    progress.synchronize(ddp, group)
    if group.rank == 0:
        print(f"generation {group.generation}: {group.size} ranks from step {progress.step}", flush=True)
    while progress.epoch < options.epochs:
        for rows in my_batches(len(data.train_labels), group, seed=options.seed * 1000 + progress.epoch):
            _, grad = softmax_cross_entropy(ddp(data.train_images[rows]), data.train_labels[rows])
            ddp.module.backward(grad)
            ddp.sync_gradients()
            progress.optimizer.step()
            progress.step += 1
        progress.epoch += 1
        # Ranks may see a new member, or the signal, at different times. The maximum makes them all decide alike.
        waiting, stopped = group.all_reduce(np.array([len(group.pending_members), stop.is_set()]), op="max")
        if stopped:
            break
        if waiting:
            return False
    report(ddp, data, group, progress)
    return True


def report(ddp: ferrorpc.DistributedDataParallel, data: Digits, group: ferrorpc.ProcessGroup, progress: Progress) -> None:
    """Compares the weights of all ranks, and prints the results on rank 0."""
    reached = accuracy(ddp, data, group)
    ddp.check_weights()  # raises CollectiveMismatchError if any two ranks have different weights
    if group.rank == 0:
        print(f"trained {progress.epoch} epochs in {progress.step} steps and {group.generation} generations")
        print(f"test accuracy {reached:.3f}")
        print(f"identical weights on {group.size} ranks")


def main() -> None:
    """Runs one process, through all generations."""
    parser = argparse.ArgumentParser(description="train a small network on handwritten digits while processes come and go")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())

    group = ferrorpc.init_process_group()
    model = DigitsNet((64, 48, 10), seed=options.seed)
    progress = Progress(model, Momentum(model.parameters(), rate=options.rate))
    finished = False
    while not finished:
        try:
            finished = train(progress, group, options, stop)
        except ferrorpc.PeerLostError as error:
            print(f"rank {group.rank} goes on: {error}", flush=True)
        if not finished:
            for parameter in model.parameters():
                parameter.grad = None  # gradients of the interrupted step
            group = group.reform()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a late signal must not make the process fail while it exits
    group.close()


if __name__ == "__main__":
    main()
