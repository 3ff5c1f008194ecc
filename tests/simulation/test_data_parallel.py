"""Data parallelism in a world whose messages take random times: for every seed the bits of one process.

The seed draws the number of ranks, the parameters and their dtypes, the size of buckets, who uses what, weights, and the order
in which each rank becomes ready. FERRORPC_SEEDS sets how many seeds are tried; FERRORPC_SEED tries a single one.
"""

from __future__ import annotations

import os
import random
from functools import reduce
from typing import Any

import numpy as np
import pytest

from ferrorpc import GradientSynchronizer, ProcessGroup
from ferrorpc.testing import FaultPlan, run_world
from ferrorpc.testing.reference import divided

SEEDS = int(os.environ.get("FERRORPC_SEEDS", "60"))
BLOCK = 20
ONLY = os.environ.get("FERRORPC_SEED")
REPLAY = "FERRORPC_SEED={seed} .venv/bin/python -m pytest tests/simulation/test_data_parallel.py"
STEPS = 3
Array = np.ndarray[Any, Any]


class Plan:
    """What all ranks do, drawn from the seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.seed = seed
        self.size = chance.choice([2, 3, 4, 8])
        self.slowest_seconds = chance.choice([0.0, 0.001, 0.05, 0.4])
        self.cap_mb = chance.choice([25, 1e-3, 2e-4, 1e-5])
        dtypes = ["float32", "float64", "float16", "complex64"] if chance.random() < 0.3 else ["float32"]
        shapes = [(), (0, 3), (1,), (7,), (5, 11), (33,), (4, 4, 4)]
        self.like = {
            f"p{index}": np.zeros(chance.choice(shapes), chance.choice(dtypes)) for index in range(chance.randint(1, 9))
        }
        self.is_weighted = chance.random() < 0.4
        self.unused_share = chance.choice([0.0, 0.0, 0.3, 0.9])

    def used(self, step: int, rank: int) -> list[str]:
        chance = random.Random(f"{self.seed}/{step}/{rank}")
        names = [name for name in self.like if chance.random() >= self.unused_share]
        chance.shuffle(names)
        return names

    def weight(self, step: int, rank: int) -> float | None:
        # Whole numbers below 2048 are exact in every dtype; rank 0 never weighs nothing.
        return float(random.Random(f"{self.seed}/w/{step}/{rank}").choice([rank == 0, 1, 3, 700])) if self.is_weighted else None

    def gradient(self, step: int, rank: int, name: str) -> Array:
        like = self.like[name]
        values = np.random.default_rng([self.seed, step, rank, int(name[1:])]).standard_normal((2, *like.shape))
        return np.asarray(values[0] + (1j * values[1] if like.dtype.kind == "c" else 0)).astype(like.dtype)

    def expected(self, step: int, name: str) -> Array | None:
        """One process: the ranks' gradients added in rank order, then divided; halves in float32, rounded once."""
        if not any(name in self.used(step, rank) and self.weight(step, rank) != 0 for rank in range(self.size)):
            return None
        dtype = self.like[name].dtype
        work = np.dtype(np.float32) if dtype == np.float16 else dtype
        real = np.zeros((), work).real.dtype.type
        terms = []
        for rank in range(self.size):
            weight = self.weight(step, rank)
            counts = name in self.used(step, rank) and weight != 0
            own = self.gradient(step, rank, name).astype(work) if counts else np.zeros(self.like[name].shape, work)
            # An array of one element or more: NumPy rounds complex products of scalars another way.
            terms.append(own if weight is None else np.multiply(own.reshape(-1), real(weight)).reshape(own.shape))
        total = self.size if not self.is_weighted else sum(self.weight(step, rank) or 0 for rank in range(self.size))
        return divided(np.asarray(reduce(np.add, terms)), total).astype(dtype)


def take_part(plan: Plan, group: ProcessGroup) -> None:
    """One rank: every step in an order of its own, pausing between gradients."""
    chance = random.Random(f"{plan.seed}/pauses/{group.rank}")
    clock = group.session.clock
    sync = GradientSynchronizer(plan.like, group, bucket_cap_mb=plan.cap_mb)
    for step in range(STEPS):
        with sync.step(plan.weight(step, group.rank)) as current:
            for name in plan.used(step, group.rank):
                if chance.random() < 0.3:
                    clock.parker().park(clock.now() + chance.random() * plan.slowest_seconds)
                current.ready(name, plan.gradient(step, group.rank, name))
        for name, found in current.grads.items():
            wanted = plan.expected(step, name)
            assert (found is None) == (wanted is None), (step, name)
            assert found is None or found.tobytes() == wanted.tobytes(), (step, name, found, wanted)


def run_seed(seed: int) -> None:
    plan = Plan(seed)
    faults = FaultPlan(delay_seconds=(0.0, plan.slowest_seconds))
    try:
        run_world(plan.size, lambda group: take_part(plan, group), faults=faults, seed=seed)
    except BaseException as error:
        error.add_note(f"replay: {REPLAY.format(seed=seed)}")
        raise


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(-(-SEEDS // BLOCK)) if ONLY is None else [])
def test_every_seed_gives_the_bits_of_one_process(block: int) -> None:
    for seed in range(block * BLOCK, min((block + 1) * BLOCK, SEEDS)):
        run_seed(seed)


@pytest.mark.skipif(ONLY is None, reason="FERRORPC_SEED names the seed to replay")
def test_the_seed_that_was_asked_for() -> None:
    run_seed(int(ONLY or 0))
