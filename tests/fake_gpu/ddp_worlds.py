"""Worlds for data parallelism on GPUs, over host lanes, NCCL and both; trees of arrays there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.worlds import host_lanes, nccl_backends

EACH_ITS_OWN_GPU = ["simulated", "nccl", "hybrid"]
LANES = [*EACH_ITS_OWN_GPU, pytest.param("cuda_ipc", marks=pytest.mark.shared_memory)]
Array = np.ndarray[Any, Any]


def world(cupy: StandIn, lanes: str, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
    """fn(group) on every rank, each with its GPU current."""
    if lanes == "cuda_ipc":
        with ipc_backends(cupy, size) as sharing:
            return run_groups([ProcessGroup(backend) for backend in sharing], fn)
    backends: list[Any]
    if lanes == "simulated":
        backends = list(host_lanes(size))
    else:
        backends = list(nccl_backends(cupy, size, kind={"nccl": NcclBackend, "hybrid": HybridBackend}[lanes]))

    def body(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            return fn(group)

    return run_groups([ProcessGroup(backend) for backend in backends], body)


def on_gpu(cupy: StandIn, tree: dict[str, Array]) -> dict[str, Any]:
    return {name: cupy.asarray(array) for name, array in tree.items()}


def at_home(cupy: StandIn, tree: dict[str, Any]) -> dict[str, Array]:
    assert all(type(array) is cupy.ndarray for array in tree.values())
    return {name: cupy.asnumpy(array) for name, array in tree.items()}
