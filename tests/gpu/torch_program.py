"""One rank of a job that trains a torch module on a GPU that it shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import ferrorpc
from ferrorpc import schedules
from ferrorpc.torch import Stage, with_gradient
from tests.fake_gpu.trained_model import one_process, train, wrapped
from tests.gpu.scenarios import FAKE, opened, run, say
from tests.unit.torch import test_stage as staged

ROWS = 17
MICROBATCHES = 7
STEPS = 2
TOLERANCE = 1e-6


@contextmanager
def device_of_torch(cupy: Any) -> Iterator[str]:
    """torch's name of the GPU."""
    if not FAKE:
        yield "cuda:0"
        return
    from tests.fake_gpu.torch_gpu import DEVICE, torch_on

    with torch_on(cupy):
        yield f"{DEVICE}:0"


def data_parallel(cupy: Any, options: dict[str, Any]) -> None:
    """A module gets the bits of one process that adds the gradients in rank order."""
    with device_of_torch(cupy) as device, opened() as group:
        ddp = wrapped(group, device)
        train(ddp, group.rank, device)
        found = {name: each.detach().cpu().numpy() for name, each in ddp.module.named_parameters()}
        for name, wanted in one_process(group.size, device).items():
            np.testing.assert_array_equal(found[name], wanted, name)
        group.barrier()
    say("done")


def pipeline(cupy: Any, options: dict[str, Any]) -> None:
    """A model in two stages gets the weights and gradients of one process that runs the same microbatches."""
    with device_of_torch(cupy) as device, opened() as group:
        for name in ("1f1b", "zb1p"):
            schedule = schedules.named(name, group.size, MICROBATCHES)
            block = staged.Block(group.rank).to(device)
            pipe = ferrorpc.Pipeline(Stage(block), group, schedule)
            optimizer = torch.optim.SGD(block.parameters(), lr=0.02)
            for step in range(STEPS):
                optimizer.zero_grad()
                x, target = (each.to(device) for each in staged.batch(ROWS, step))
                loss = pipe.step(x, target, with_gradient(staged.loss_of))
                assert (loss is None) == (group.rank < group.size - 1)
                optimizer.step()
            alone = staged.one_process(group.size, ROWS, MICROBATCHES, STEPS, device)[group.rank]
            for found, wanted in zip(block.parameters(), alone.parameters(), strict=True):
                assert str(found.grad.device) == device
                assert (found - wanted).norm() <= TOLERANCE * wanted.norm(), name
                assert (found.grad - wanted.grad).norm() <= TOLERANCE * wanted.grad.norm(), name
        group.barrier()
    say("done")


SCENARIOS = {"data_parallel": data_parallel, "pipeline": pipeline}

if __name__ == "__main__":
    run(SCENARIOS)
