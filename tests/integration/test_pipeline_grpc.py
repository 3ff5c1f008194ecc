"""Pipelines over gRPC: the bits of one process, and a rank that dies is named by all others."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.errors import PeerLostError
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_groups
from tests.integration.test_grpc_backend import GrpcWorld
from tests.unit.pipeline.stages import Layer, batch, descend, gradients, half_square, one_process

STEPS = 20


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb1p", "zbv"])
def test_twenty_steps_are_those_of_one_process_bit_for_bit(name: str, stages: int) -> None:
    schedule = schedules.named(name, stages, 7)

    def body(group: ProcessGroup) -> dict[int, Layer]:
        layers = {number: Layer(number) for number in schedule.pieces(group.rank)}
        pipe = Pipeline(list(layers.values()), group, schedule)
        for step in range(STEPS):
            if step:
                descend(layers.values())
            pipe.step(*batch(17, seed=step), half_square)
        return layers

    with GrpcWorld(stages) as world:
        results = run_groups([ProcessGroup(backend, timeout=30.0) for backend in world.backends], body)
    pipelined = {number: layer for held in results for number, layer in held.items()}
    alone = [Layer(number) for number in range(schedule.virtual_stages)]
    for step in range(STEPS):
        if step:
            descend(alone)
        one_process(alone, *batch(17, seed=step), half_square, 7)
    for number, layer in enumerate(alone):
        np.testing.assert_array_equal(pipelined[number].weight.data, layer.weight.data)
        assert all(map(np.array_equal, gradients([pipelined[number]]), gradients([layer])))


def test_messages_of_several_chunks_arrive_whole() -> None:
    """Activations of 8 MiB, beyond what travels before the receiver has asked for it."""

    class Plus:
        def forward(self, x):
            return x + 1, None

        def backward(self, context, grad_y):
            return grad_y

    x = np.arange(4 << 20, dtype=np.float64).reshape(4, -1)

    def body(group: ProcessGroup) -> float | None:
        pipe = Pipeline(Plus(), group, "gpipe", 4)
        return pipe.step(x, x, lambda y, target: (float((y - target).sum()), np.zeros_like(y)), reduction="sum")

    with GrpcWorld(2) as world:
        results = run_groups([ProcessGroup(backend, timeout=30.0) for backend in world.backends], body)
    assert results == [None, 2.0 * x.size]


def test_a_rank_that_dies_is_named_by_the_others() -> None:
    class Mortal(Layer):
        def forward(self, x):
            if self.weight.grad is not None:
                world.world.kill(1, "for a test")
            return super().forward(x)

    def body(group: ProcessGroup) -> None:
        pipe = Pipeline(Mortal(1) if group.rank == 1 else Layer(group.rank), group, "1f1b", 4)
        for _ in range(3):
            pipe.step(*batch(8), half_square)

    with GrpcWorld(3) as world:
        groups = [ProcessGroup(backend, timeout=30.0) for backend in world.backends]
        first, _, third = run_groups(groups, body, return_exceptions=True)
    for error in (first, third):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
