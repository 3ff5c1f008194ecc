"""Stages whose module is wrapped in DistributedDataParallel: each microbatch's backward averages over the replicas."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from ferrorpc.errors import GroupAbortedError, UsageError
from ferrorpc.mesh import Mesh
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")
ferrorpc_torch = pytest.importorskip("ferrorpc.torch")
Stage, DistributedDataParallel = ferrorpc_torch.Stage, ferrorpc_torch.DistributedDataParallel
loss_fn = ferrorpc_torch.with_gradient(torch.nn.functional.mse_loss)
WIDTH, MICROBATCHES = 4, 4


def rows_that_count(target) -> float:
    return float((target != 0).any(1).sum())


def stage_of(mesh: Mesh, is_wrapped: bool = True) -> Stage:
    torch.manual_seed(mesh["pp"].rank)
    module = torch.nn.Linear(WIDTH, WIDTH)
    return Stage(torch.nn.Sequential(DistributedDataParallel(module, mesh["dp"])) if is_wrapped else module, split=False)


def made(group) -> tuple[Mesh, Stage]:
    mesh = Mesh({"dp": 1, "pp": 2}, group)
    return mesh, stage_of(mesh, is_wrapped=False)


def pipeline_step(mesh: Mesh, stage: Stage, empty: int | None):
    """A step in which one microbatch, if any, has weight 0. Returns the gradient of the stage's weight."""
    x, target = torch.ones(2 * MICROBATCHES, WIDTH), torch.ones(2 * MICROBATCHES, WIDTH)
    if empty is not None:
        target[2 * empty : 2 * empty + 2] = 0
    Pipeline(stage, mesh["pp"], "1f1b", MICROBATCHES).step(x, target, loss_fn, weight=rows_that_count)
    return next(stage.parameters()).grad


@pytest.mark.parametrize("wrapped", [(0,), (1,), (0, 1)])
def test_a_microbatch_that_would_shift_the_averagings_of_a_replica_is_refused(wrapped):
    """Else its later backwards would be averaged with those of other microbatches, in this step and in all that follow."""

    def body(group):
        mesh = Mesh({"dp": 2, "pp": 2}, group)
        stage = stage_of(mesh, mesh["pp"].rank in wrapped)
        for step in range(2):
            pipeline_step(mesh, stage, empty=0 if mesh["dp"].rank == step else None)

    errors = run_world(4, body, return_exceptions=True)
    assert all(isinstance(each, UsageError | GroupAbortedError) for each in errors)
    assert "microbatch 0 has weight 0, but each backward of stage" in "\n".join(map(str, errors))


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_left_out_where_nothing_is_averaged(replicas: int):
    def body(group):
        mesh = Mesh({"dp": replicas, "pp": 2}, group)
        stage = stage_of(mesh)
        with stage.module[0].no_sync() if replicas > 1 else nullcontext():
            return pipeline_step(mesh, stage, empty=mesh["dp"].rank)

    alone = run_world(2, lambda group: pipeline_step(*made(group), empty=0))

    for place, found in enumerate(run_world(2 * replicas, body)):
        torch.testing.assert_close(found, alone[place % 2])
