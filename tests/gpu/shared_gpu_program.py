"""One rank of a job whose ranks share one GPU: random programs, and what becomes of them when a rank is lost."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np

import ferrorpc
from ferrorpc.testing.reference import check_same, reduced, values
from ferrorpc.types import DType, ReduceOp
from tests.gpu.random_calls import Call, Running, program
from tests.gpu.scenarios import Scenario, check_computes, opened, run, say

PENDING_MAX = 5
"""How many calls of a program are in flight, or their results unseen, at most."""
BALLAST_BYTES = 16 << 20
LATE_COPIES = 40
KEPT: list[Any] = []
"""What late copies read and write: they may still be queued when a program ends with an error."""
REFORM_SECONDS = 40.0
CALLS_AFTER = 25
"""How many calls of a program show that a renewed group is as good as new."""


class Program:
    """A random program of one rank: on several streams, several calls at a time, in the world and in subgroups."""

    def __init__(self, cupy: Any, group: ferrorpc.ProcessGroup, seed: int) -> None:
        self._cupy, self._seed, self._rank = cupy, seed, group.rank
        size = group.size
        self.members = [list(range(size)), list(range(size))[::-1], list(range(0, size, 2)), [size - 1, 0][: min(size, 2)]]
        self._groups = [group, *(group.subgroup(ranks) for ranks in self.members[1:])]
        self._streams = [None if each is None else each.stream() for each in self._groups]
        self._cuda_streams = [cupy.cuda.Stream(null=True), *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
        self._ballast = cupy.asarray(np.ones(BALLAST_BYTES, np.uint8))
        self._spare = cupy.asarray(np.zeros(BALLAST_BYTES, np.uint8))
        KEPT.append((self._ballast, self._spare))
        self._pending: list[tuple[Any, Running]] = []
        self._order = random.Random(seed)

    def run(self, count: int | None, heard: int = 0) -> None:
        """So many calls, without an end where None. After `heard` of them it says "running". Raises AssertionError where a
        result is not what it must be, and what calls raise."""
        for call in itertools.islice(program(self._seed, self.members), count):
            self.begin(call)
            while len(self._pending) > PENDING_MAX or (self._pending and self._order.random() < 0.5):
                self._check(self._order.randrange(len(self._pending)))
            if heard and call.place == heard:
                say("running")
        while self._pending:
            self._check(0)

    def begin(self, call: Call) -> None:
        """Begins a call, after work on the GPU that takes a while if it is a late one. Ranks that have no part in it keep its
        place, so that all wait for the same ones."""
        stream = random.Random(f"{self._seed} {call.place} {self._rank}").choice(self._cuda_streams)
        group, numbered = self._groups[call.group], self._streams[call.group]
        running: Any = None
        if group is not None and numbered is not None:
            with stream:
                if call.late:
                    for _ in range(LATE_COPIES):
                        self._spare[...] = self._ballast
                running = Running(self._cupy, call, group, numbered)
        self._pending.append((stream, running))

    def _check(self, which: int) -> None:
        stream, running = self._pending.pop(which)
        if running is not None:
            if running.is_async:
                stream = random.Random(f"{running.call!r} {self._rank}").choice(self._cuda_streams)
            with stream:
                running.check()


def run_values(cupy: Any, options: dict[str, Any]) -> None:
    """A random program, and an array of more than a slot."""
    with opened() as group:
        Program(cupy, group, options["seed"]).run(options["count"])
        large(cupy, group, options["large_bytes"])
        group.barrier()
    say("done")


def large(cupy: Any, group: ferrorpc.ProcessGroup, size_bytes: int) -> None:
    """Reductions and moves of more than one slot, which is no multiple of anything."""
    shape = (size_bytes // 4 + 12_345,)
    arrays = [np.resize(values(DType.FLOAT32, (4099,), rank, 7), shape) for rank in range(group.size)]
    x = cupy.asarray(arrays[group.rank])
    total = reduced(arrays, ReduceOp.SUM, DType.FLOAT32)
    check_same(cupy.asnumpy(group.all_reduce(x)), total, "a large all_reduce")
    work = group.reduce_scatter(x, async_op=True)
    for rank, each in enumerate(group.all_gather(x)):
        check_same(cupy.asnumpy(each), arrays[rank], f"a large all_gather, item {rank}")
    check_same(cupy.asnumpy(work.wait()), np.array_split(total, group.size)[group.rank], "a large reduce_scatter")
    found = group.broadcast(x, group.size - 1, out=x)
    check_same(cupy.asnumpy(found), arrays[-1], "a large broadcast")


def endure(cupy: Any, options: dict[str, Any]) -> None:
    """A random program until a rank is lost, and another one with the rank that replaces it."""
    group = opened()
    try:
        Program(cupy, group, options["seed"]).run(None, heard=3)
    except ferrorpc.PeerLostError as error:
        say("lost", error.rank, time.time())
    check_computes(cupy)
    with group.reform(REFORM_SECONDS) as renewed:
        follow(cupy, renewed, options)


def rejoin(cupy: Any, options: dict[str, Any]) -> None:
    """Takes the place of a rank that was lost."""
    with opened() as group:
        follow(cupy, group, options)


def follow(cupy: Any, group: ferrorpc.ProcessGroup, options: dict[str, Any]) -> None:
    """A random program in a generation that follows another one."""
    assert group.generation > 1, "the first generation has not ended"
    Program(cupy, group, options["seed"] + 1).run(CALLS_AFTER)
    say("done")


SCENARIOS: dict[str, Scenario] = {"values": run_values, "endure": endure, "rejoin": rejoin}


if __name__ == "__main__":
    run(SCENARIOS)
