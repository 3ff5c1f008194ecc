"""What training copies from GPUs to the host ends with the generation, and has the group's timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.arrays import staging
from ferrorpc.errors import GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.ddp_worlds import world

COPIES = ["zero", "a hook on the host", "check_weights"]


def copying(what: str, group: ProcessGroup, weights: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """A function of gradients, or weights, that copies them to the host."""
    if what == "zero":
        return ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.SGD(0.5)).step
    hook = ferrorpc.hooks.PowerSGD(1) if what == "a hook on the host" else None
    sync = ferrorpc.GradientSynchronizer(weights, group, hook=hook)
    return sync.check_weights if what == "check_weights" else sync


@pytest.mark.parametrize("what", COPIES)
@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
def test_the_end_of_the_generation_ends_a_copy_from_a_gpu_that_is_late(
    cupy: StandIn, lanes: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "COPY_SECONDS", 3.0)
    released: list[bool] = []

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            weights = {"w": cupy.asarray(np.ones((40, 30), np.float32))}
            copy = copying(what, group, weights)
            copy(weights)
            if group.rank == 0:
                time.sleep(0.2)
                group.abort("enough")
                return
            stream.fake.enqueue(lambda: bool(released))
            with pytest.raises(GroupAbortedError, match="enough"):
                copy(weights)
            released.append(True)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("what", COPIES)
def test_a_copy_waits_for_a_late_rank_as_long_as_its_group(cupy: StandIn, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits on the GPU for an operation that a rank comes late to."""
    monkeypatch.setattr(staging, "COPY_SECONDS", 0.2)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            weights = {"w": cupy.asarray(np.ones((40, 30), np.float32))}
            group.all_reduce(weights["w"])
            copy = copying(what, group, weights)
            if group.rank == 0:
                time.sleep(0.6)
            copy({"w": group.all_reduce(weights["w"])})

    world(cupy, "hybrid", 2, body)
