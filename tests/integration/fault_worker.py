"""Ranks that do all kinds of operations, each checked, until one of them is lost; forked from a process that has imported all.

    python -m tests.integration.fault_worker COORDINATOR

On stdin: "TRIAL SIZE TRANSPORT SEED" forks the ranks of a world. On stdout: "TRIAL RANK WORD ...", where the words are `running
PID` once a rank is in its loop, `lost PEER SECONDS LEFTOVERS` when it has got a PeerLostError, closed its group (which took
so long) and looked what of it is left in the process, `wrong WHAT` for any other outcome, and `exit CODE` when it has ended.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ferrorpc

# ferrorpc comes first: it sets what gRPC reads when it is imported.
# isort: split
import grpc
import numpy as np

import ferrorpc.backends.registry
import ferrorpc.coordination.session
import ferrorpc.transports.shared_memory.handshake
from ferrorpc import PeerLostError, ProcessGroup

Array = np.ndarray[Any, Any]

SMALL, MIDDLE, LARGE, HUGE = 16, 40_000, 300_000, 1_500_000
"""Values of float32: through a slot, through a ring of memory, in several chunks of a message, beyond eager credit."""


def say(trial: str, rank: int, *words: object) -> None:
    """One line, whole: lines of all ranks go to the same pipe."""
    os.write(1, (" ".join(map(str, (trial, rank, *words))).replace("\n", " ")[:2000] + "\n").encode())


def part(rank: int, size: int, turn: int) -> Array:
    """What a rank brings to a turn; sums of it are exact in float32, and in bfloat16 up to 4 ranks."""
    return ((np.arange(size) + 3 * rank + turn) % 32).astype(np.float32)


class Loop:
    """Operations of one rank, drawn alike on every rank."""

    def __init__(self, group: ProcessGroup, seed: int) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.seed = seed
        self.turn = 0
        self.registered = group.empty(LARGE)
        self.pair = group.subgroup([0, 1])
        self.everyone = group.subgroup(list(range(self.size)))
        self.operations: list[Callable[[int], None]] = [
            lambda count: self.all_reduce(count),
            lambda count: self.all_reduce(count, algorithm="ring"),
            lambda count: self.all_reduce(count, wire="bf16"),
            self.in_place,
            self.several_at_once,
            self.moves,
            self.reductions,
            self.around,
            self.around_at_once,
            self.in_subgroups,
            lambda count: self.group.barrier(),
        ]

    def step(self) -> None:
        self.turn += 1
        chance = random.Random(self.seed * 1_000_003 + self.turn)
        chance.choice(self.operations)(chance.choice([SMALL, SMALL, MIDDLE, LARGE, HUGE]))

    def check(self, what: str, found: Array, expected: Array) -> None:
        if found.shape != expected.shape or not np.array_equal(found, expected):
            raise AssertionError(f"{what} of turn {self.turn} on rank {self.rank} is wrong")

    def mine(self, count: int) -> Array:
        return part(self.rank, count, self.turn)

    def total(self, count: int) -> Array:
        return sum((part(rank, count, self.turn) for rank in range(1, self.size)), part(0, count, self.turn))

    def all_reduce(self, count: int, **how: Any) -> None:
        self.check(f"all_reduce {how}", self.group.all_reduce(self.mine(count), **how), self.total(count))

    def in_place(self, count: int) -> None:
        x = self.registered[: min(count, LARGE)]
        x[:] = self.mine(x.size)
        self.check("all_reduce in registered memory", self.group.all_reduce(x, out=x), self.total(x.size))

    def several_at_once(self, count: int) -> None:
        works = [self.group.all_reduce(self.mine(size), async_op=True) for size in (SMALL, count, MIDDLE)]
        for work, size in zip(reversed(works), (MIDDLE, count, SMALL), strict=True):
            self.check("an asynchronous all_reduce", work.wait(), self.total(size))

    def moves(self, count: int) -> None:
        root = self.turn % self.size
        found = self.group.broadcast(self.mine(count) if self.rank == root else None, root=root)
        self.check("broadcast", found, part(root, count, self.turn))
        for rank, found in enumerate(self.group.all_gather(self.mine(count))):
            self.check("all_gather", found, part(rank, count, self.turn))
        pieces = [part(self.rank + rank, count // self.size, self.turn) for rank in range(self.size)]
        for rank, found in enumerate(self.group.all_to_all(pieces)):
            self.check("all_to_all", found, part(rank + self.rank, count // self.size, self.turn))

    def reductions(self, count: int) -> None:
        root = self.turn % self.size
        found = self.group.reduce(self.mine(count), root=root)
        if self.rank == root:
            self.check("reduce", found, self.total(count))
        found = self.group.reduce_scatter(self.mine(count))
        self.check("reduce_scatter", found, np.array_split(self.total(count), self.size)[self.rank])

    def around(self, count: int) -> None:
        """Everybody sends to the next rank; rank 0 receives first."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.rank:
            self.group.send(self.mine(count), after, tag=1)
        found = self.group.recv(before, tag=1)
        if not self.rank:
            self.group.send(self.mine(count), after, tag=1)
        self.check("recv", found, part(before, count, self.turn))

    def around_at_once(self, count: int) -> None:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = [self.group.send(self.mine(count), after, tag=tag, async_op=True) for tag in (2, 3)]
        for tag in (3, 2):
            self.check("recv", self.group.recv(before, tag=tag), part(before, count, self.turn))
        for work in works:
            work.wait()

    def in_subgroups(self, count: int) -> None:
        for group in (self.pair, self.everyone):
            if group is not None:
                total = sum((part(rank, count, self.turn) for rank in range(1, group.size)), part(0, count, self.turn))
                self.check("all_reduce of a subgroup", group.all_reduce(self.mine(count)), total)


def leftovers() -> list[str]:
    """What of shared memory this process still has."""
    gc.collect()
    mapped = [line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ferrorpc" in line]
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return mapped + [name for name in opened if "memfd:ferrorpc" in name]


def until_lost(trial: str, rank: int, group: ProcessGroup, seed: int) -> tuple[int, float]:
    """Who was lost, and how long closing the group took."""
    loop = Loop(group, seed)
    say(trial, rank, "running", os.getpid())
    try:
        while True:
            loop.step()
    except PeerLostError as error:
        lost = error.rank
    began = time.monotonic()
    group.close()
    return lost, time.monotonic() - began


def run(trial: str, rank: int, size: int, transport: str, seed: int, coordinator: str) -> int:
    """One rank, from joining to its last word; its exit code."""
    try:
        group = ferrorpc.init_process_group(
            "grpc",
            transport,
            coordinator=coordinator,
            job=trial,
            name=f"rank-{rank}",
            world_size=str(size),
            rank_hint=str(rank),
        )
        lost, seconds = until_lost(trial, group.rank, group, seed)
        del group
        say(trial, rank, "lost", lost, round(seconds, 3), *leftovers())
    except BaseException as error:
        say(trial, rank, "wrong", repr(error))
        return 1
    return 0


def main() -> None:
    assert grpc.__version__
    faulthandler.register(signal.SIGUSR1)
    coordinator = sys.argv[1]
    children: dict[int, tuple[str, int]] = {}
    source = os.fdopen(0, "rb", buffering=0)
    waiting = b""
    while True:
        if select.select([source], [], [], 0.02)[0]:
            data = source.read(4096)
            if not data:
                break
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                trial, size, transport, seed = line.decode().split()
                for rank in range(int(size)):
                    child = os.fork()
                    if child == 0:
                        os._exit(run(trial, rank, int(size), transport, int(seed), coordinator))
                    children[child] = trial, rank
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                say(*children.pop(child), "exit", os.waitstatus_to_exitcode(status))
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
