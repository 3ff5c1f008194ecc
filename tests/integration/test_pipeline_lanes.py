"""Stages of torch over gRPC and shared memory train as in one process; those of NumPy do so in tests/contract."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc import schedules
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_groups
from tests.integration.test_grpc_backend import GrpcWorld

MICROBATCHES = {2: 4, 3: 7, 4: 8}


@pytest.mark.parametrize("lane", ["grpc", "shared_memory"])
@pytest.mark.parametrize("ranks", list(MICROBATCHES))
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_torch_weights_are_those_of_one_process(name: str, ranks: int, lane: str) -> None:
    torch = pytest.importorskip("torch")
    from ferrorpc.torch import Stage, with_gradient
    from tests.unit.torch.test_stage import Block, batch as tensors, loss_of, one_process as one_torch_process

    schedule, threads = schedules.named(name, ranks, MICROBATCHES[ranks]), torch.get_num_threads()
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
        with GrpcWorld(ranks, transport=lane) as world:
            held = run_groups([ProcessGroup(backend, timeout=30.0) for backend in world.backends], body)
    finally:
        torch.set_num_threads(threads)
    pipelined = {number: block for blocks in held for number, block in blocks.items()}
    for number, block in enumerate(one_torch_process(schedule.virtual_stages, 17, schedule.microbatches, steps=2)):
        for found, wanted in zip(pipelined[number].parameters(), block.parameters(), strict=True):
            assert (found - wanted).norm() <= 1e-6 * wanted.norm()
            assert (found.grad - wanted.grad).norm() <= 1e-6 * wanted.grad.norm()
