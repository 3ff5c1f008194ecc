"""Pipelines over gRPC and over shared memory give the gradients of one process, as they do in simulated worlds.

The model has a stage with two inputs and a pair of tied weights; microbatches are uneven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_groups
from tests.integration.test_grpc_backend import GrpcWorld
from tests.unit.pipeline.models import edges_of, one_process, stage_of, ties_of, whole_model
from tests.unit.pipeline.stages import batch, descend, gradients, half_square

NAMES = ("gpipe", "1f1b", "looped_bfs", "interleaved", "zb1p", "zb1p 2", "zbv", "dualpipe_v")
MICROBATCHES = {2: 4, 3: 7, 4: 8}
STEPS = 20


pytestmark = [pytest.mark.parametrize("lane", ["grpc", "shared_memory"]), pytest.mark.parametrize("ranks", list(MICROBATCHES))]


def on_lane(lane: str, ranks: int, body: Callable[[ProcessGroup], dict[int, Any]]) -> dict[int, Any]:
    """What the ranks' bodies return, as one."""
    with GrpcWorld(ranks, transport=lane) as world:
        held = run_groups([ProcessGroup(backend, timeout=30.0) for backend in world.backends], body)
    return {number: stage for stages in held for number, stage in stages.items()}


def schedule_of(name: str, ranks: int) -> schedules.Schedule:
    key, _, chunks = name.partition(" ")
    microbatches = 8 if name == "dualpipe_v" else MICROBATCHES[ranks]
    return schedules.named(key, ranks, microbatches, int(chunks) if chunks else None)


def trained(lane: str, schedule: schedules.Schedule, steps: int, data: Callable[[int], Any], dtype: Any) -> list[Any]:
    """All stages by number; a step of descent comes before each step but the first."""
    pieces = schedule.virtual_stages

    def body(group: ProcessGroup) -> dict[int, Any]:
        stages = {number: stage_of(number, pieces, dtype) for number in schedule.pieces(group.rank)}
        pipe = Pipeline(list(stages.values()), group, schedule, edges=edges_of(pieces), tied=ties_of(pieces))
        for step in range(steps):
            if step:
                descend(list(stages.values()))
            pipe.step(*data(step), half_square)
        return stages

    held = on_lane(lane, schedule.stages, body)
    return [held[number] for number in range(pieces)]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process_bit_for_bit(name: str, ranks: int, lane: str) -> None:
    schedule = schedule_of(name, ranks)
    steps = STEPS if name == "zbv" else 3
    pipelined = trained(lane, schedule, steps, lambda step: batch(17, seed=step), np.float64)
    alone = whole_model(schedule.virtual_stages)
    for step in range(steps):
        if step:
            descend(alone)
        one_process(alone, *batch(17, seed=step), half_square, schedule.microbatches)
    for found, wanted in zip(gradients(pipelined), gradients(alone), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(pipelined, alone, strict=True):
        np.testing.assert_array_equal(found.weight.data, wanted.weight.data)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_gradients_are_those_of_the_whole_batch_at_once(name: str, dtype: Any, tolerance: float, ranks: int, lane: str) -> None:
    schedule = schedule_of(name, ranks)
    pipelined = trained(lane, schedule, 1, lambda _: batch(17, dtype=dtype), dtype)
    alone = whole_model(schedule.virtual_stages, dtype)
    one_process(alone, *batch(17, dtype=dtype), half_square, 1)
    for found, wanted in zip(gradients(pipelined), gradients(alone), strict=True):
        assert found.dtype == dtype
        assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_torch_weights_are_those_of_one_process(name: str, ranks: int, lane: str) -> None:
    torch = pytest.importorskip("torch")
    from ferrorpc.torch import Stage, with_gradient
    from tests.unit.torch.test_stage import Block, batch as tensors, loss_of, one_process as one_torch_process

    schedule, threads = schedule_of(name, ranks), torch.get_num_threads()
    torch.set_num_threads(1)  # more for each of many small operators in many ranks would only wait for each other
    everyones = [Block(number) for number in range(schedule.virtual_stages)]

    def body(group: ProcessGroup) -> dict[int, Any]:
        blocks = {number: everyones[number] for number in schedule.pieces(group.rank)}
        pipe = Pipeline([Stage(block) for block in blocks.values()], group, schedule)
        optimizer = torch.optim.SGD([each for block in blocks.values() for each in block.parameters()], lr=0.02)
        for step in range(2):
            optimizer.zero_grad()
            pipe.step(*tensors(17, step), with_gradient(loss_of))
            optimizer.step()
        return blocks

    try:
        pipelined = on_lane(lane, ranks, body)
    finally:
        torch.set_num_threads(threads)
    for number, block in enumerate(one_torch_process(schedule, 17, schedule.microbatches, steps=2)):
        for found, wanted in zip(pipelined[number].parameters(), block.parameters(), strict=True):
            assert (found - wanted).norm() <= 1e-6 * wanted.norm()
            assert (found.grad - wanted.grad).norm() <= 1e-6 * wanted.grad.norm()
