"""Training that goes on while processes come and go: `ferrorpc run -n 4 --world-size 2:4 examples/digits_elastic.py`.

The network and the data are those of digits_ddp.py. When a process dies, the others form the next generation and go on; who
comes later is let in at the end of an epoch. All then continue from the rank that is furthest, so that no step is lost. An
epoch that was broken off begins again, with the weights it had reached. SIGUSR1 to any process: this epoch is the last.
"""

from __future__ import annotations

import argparse
import signal
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from digits_ddp import accuracy, load, my_batches, weights_hash
from digits_model import DigitsNet, Momentum, softmax_cross_entropy

import ferrorpc


@dataclass
class Progress:
    """What a process has of the training: its weights, their velocities, and how far they are."""

    model: DigitsNet
    optimizer: Momentum
    epoch: int = 0
    step: int = 0

    def agree(self, ddp: ferrorpc.DistributedDataParallel, group: ferrorpc.ProcessGroup) -> None:
        """Gives every rank what the furthest one has. Collective."""
        reached = [tuple(both) for both in group.all_gather(np.array([self.step, self.epoch]))]
        furthest = max(range(group.size), key=lambda rank: reached[rank])
        ddp.broadcast_parameters(root=furthest)
        for velocity in self.optimizer.velocities:
            group.broadcast(velocity, root=furthest, out=velocity)
        self.step, self.epoch = (int(number) for number in reached[furthest])


def train(progress: Progress, group: ferrorpc.ProcessGroup, options: Any, enough: threading.Event) -> bool:
    """Trains with this generation's members. False when others wait to be let in, True when the training is over.

    Raises:
        PeerLostError: a member was lost; those that are left can go on.
    """
    data = load(group, options.seed)
    ddp = ferrorpc.DistributedDataParallel(progress.model, group, init_sync=False)
    progress.agree(ddp, group)
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
        # Each sees these at a moment of its own, but all have to do the same.
        waiting, over = group.all_reduce(np.array([len(group.pending_members), enough.is_set()]), op="max")
        if over:
            break
        if waiting:
            return False
    report(ddp, data, group, progress)
    return True


def report(ddp: ferrorpc.DistributedDataParallel, data: Any, group: ferrorpc.ProcessGroup, progress: Progress) -> None:
    """Rank 0 tells how it went."""
    reached = accuracy(ddp, data, group)
    hashes = {other.tobytes() for other in group.all_gather(np.frombuffer(weights_hash(ddp), np.uint8))}
    if len(hashes) > 1:
        raise SystemExit(f"the ranks hold {len(hashes)} different sets of weights")
    if group.rank == 0:
        print(f"trained {progress.epoch} epochs in {progress.step} steps and {group.generation} generations")
        print(f"test accuracy {reached:.3f}")
        print(f"identical weights on {group.size} ranks")


def main() -> None:
    """One process's part, from one generation to the next."""
    parser = argparse.ArgumentParser(description="train a small network on handwritten digits while processes come and go")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes the split, the batches and the initial weights")
    options = parser.parse_args()
    enough = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: enough.set())

    group = ferrorpc.init_process_group()
    model = DigitsNet((64, 48, 10), seed=options.seed)
    progress = Progress(model, Momentum(model.parameters(), rate=options.rate))
    over = False
    while not over:
        try:
            over = train(progress, group, options, enough)
        except ferrorpc.PeerLostError as error:
            print(f"rank {group.rank} goes on: {error}", flush=True)
        if not over:
            for parameter in model.parameters():
                parameter.grad = None  # what was left of a step that was broken off
            group = group.reform()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes late must not end the process as a failure
    group.close()


if __name__ == "__main__":
    main()
