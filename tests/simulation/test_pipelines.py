"""Pipelines of any shape in a world whose messages take random times, alone and beside replicas of themselves.

For every seed: no hang, and the weights are bit for bit those of one process. And wherever a rank dies, all others name it.
FERRORPC_SEEDS sets how many seeds are tried; FERRORPC_SEED tries a single one, and is what a failure tells you to run.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from ferrorpc import GradientSynchronizer, Mesh, Pipeline, ProcessGroup, schedules
from ferrorpc.errors import PeerLostError
from ferrorpc.testing import FaultPlan, Kill, RankKilled, VirtualClock, run_world
from tests.unit.pipeline.models import Joint, edges_of, one_process, stage_of, ties_of, whole_model
from tests.unit.pipeline.stages import batch, descend, gradients, half_square

SEEDS = int(os.environ.get("FERRORPC_SEEDS", "120"))
BLOCK = 25
ONLY = os.environ.get("FERRORPC_SEED")
REPLAY = "FERRORPC_SEED={seed} .venv/bin/python -m pytest tests/simulation/test_pipelines.py"
STEPS = 2


class Case:
    """What a seed stands for."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.replicas = chance.choice([1, 1, 2])
        stages = chance.randint(2, 4 // self.replicas + (self.replicas == 1))
        name = chance.choice([*schedules.NAMED, "custom"])
        microbatches = chance.randint(2 * stages if name == "dualpipe_v" else 1, 9 + stages)
        chunks = chance.randint(1, 3) if name in ("looped_bfs", "interleaved", "zb1p") else None
        self.schedule = schedules.named("1f1b" if name == "custom" else name, stages, microbatches, chunks)
        if name == "custom":  # another sound order of the same actions: receives and sends where they fall
            self.schedule = schedules.Schedule.from_text(self.schedule.with_messages().to_text())
        self.pieces = self.schedule.virtual_stages
        self.rows = microbatches + chance.randint(0, 2 * microbatches)
        self.ties = ties_of(self.pieces) if chance.random() < 0.5 else []
        self.edges = edges_of(self.pieces) if self.ties or chance.random() < 0.5 else None
        self.slowest_seconds = chance.choice([0.0, 0.001, 0.05, 0.4])

    @property
    def ranks(self) -> int:
        return self.replicas * self.schedule.stages

    def stage(self, number: int) -> Joint:
        if self.edges is None:
            return Joint(number, 1, 1)
        return stage_of(number, self.pieces)

    def data(self, replica: int, step: int) -> tuple[Any, Any]:
        return batch(self.rows, seed=10 * step + replica)


def take_part(case: Case, group: ProcessGroup) -> dict[int, Joint]:
    """One rank: its stages, trained."""
    mesh = Mesh({"dp": case.replicas, "pp": case.schedule.stages}, group)
    replica, place = mesh.coordinates["dp"], mesh.coordinates["pp"]
    stages = {number: case.stage(number) for number in case.schedule.pieces(place)}
    pipe = Pipeline(list(stages.values()), mesh["pp"], case.schedule, edges=case.edges, tied=case.ties)
    sync = GradientSynchronizer({name: each.data for name, each in pipe.named_parameters()}, mesh["dp"], bucket_cap_mb=0.0003)
    for step in range(STEPS):
        if step:
            descend(stages.values())
        with sync.step() as means:

            def ready(piece: int, means: Any = means) -> None:
                for name, parameter in pipe.named_parameters(piece):
                    means.ready(name, parameter.grad)

            pipe.step(*case.data(replica, step), half_square, on_gradients=ready)
        for name, parameter in pipe.named_parameters():
            parameter.grad = means.grads[name]
    return stages


def alone(case: Case) -> list[Joint]:
    """The same in one process: replicas one after the other, the mean of their gradients."""
    stages = whole_model(case.pieces) if case.ties else [case.stage(number) for number in range(case.pieces)]
    for step in range(STEPS):
        if step:
            descend(stages)
        found = []
        for replica in range(case.replicas):
            for parameter in (each for stage in stages for each in stage.parameters()):
                parameter.grad = None
            skips, ties = case.edges is not None, bool(case.ties)
            one_process(stages, *case.data(replica, step), half_square, case.schedule.microbatches, skips=skips, ties=ties)
            found.append(gradients(stages))
        for parameter, *parts in zip((each for stage in stages for each in stage.parameters()), *found, strict=True):
            parameter.grad = parts[0] if len(parts) == 1 else (parts[0] + parts[1]) / 2
    return stages


def run_seed(seed: int) -> None:
    case = Case(seed)
    faults = FaultPlan(delay_seconds=(0.0, case.slowest_seconds))
    try:
        results = run_world(case.ranks, lambda group: take_part(case, group), faults=faults, seed=seed)
        wanted = alone(case)
        for held in results:
            for number, stage in held.items():
                np.testing.assert_array_equal(stage.weight.data, wanted[number].weight.data)
                np.testing.assert_array_equal(stage.weight.grad, wanted[number].weight.grad)
    except BaseException as error:
        error.add_note(f"replay: {REPLAY.format(seed=seed)}")
        raise


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(-(-SEEDS // BLOCK)) if ONLY is None else [])
def test_no_seed_hangs_or_changes_a_bit(block: int) -> None:
    for seed in range(block * BLOCK, min((block + 1) * BLOCK, SEEDS)):
        run_seed(seed)


@pytest.mark.skipif(ONLY is None, reason="FERRORPC_SEED names the seed to replay")
def test_the_seed_that_was_asked_for() -> None:
    run_seed(int(ONLY or 0))


@pytest.mark.parametrize("seed", range(60))
def test_wherever_a_rank_dies_all_others_name_it_at_once(seed: int) -> None:
    case, chance, clock = Case(seed), random.Random(seed), VirtualClock(seed)
    victim = chance.randrange(case.ranks)
    faults = FaultPlan(delay_seconds=(0.0, case.slowest_seconds), kill={victim: Kill(at_operation=chance.randint(1, 25))})
    ended = {}

    def body(group: ProcessGroup) -> None:
        try:
            while True:
                take_part(case, group)
        finally:
            ended[group.rank] = clock.now()

    results = run_world(case.ranks, body, faults=faults, seed=seed, clock=clock, return_exceptions=True)
    for rank, error in enumerate(results):
        assert isinstance(error, RankKilled if rank == victim else PeerLostError)
        assert rank == victim or error.rank == victim
        assert ended[rank] - ended[victim] < 1e-3, "no timeout had to pass"
