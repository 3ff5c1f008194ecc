"""Pipelines over gRPC: long messages, and a rank that dies is named by all others."""

from __future__ import annotations

import numpy as np

from ferrorpc.errors import PeerLostError
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_groups
from tests.integration.test_grpc_backend import GrpcWorld
from tests.unit.pipeline.stages import Layer, batch, half_square


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
