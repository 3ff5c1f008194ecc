"""The digits example with its network on GPUs, over the fakes: the weights it gets from NumPy, bit for bit."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

import ferrorpc
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.worlds import host_lanes, nccl_backends

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 2
pytest.importorskip("tqdm")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """examples/digits_ddp.py as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("digits_ddp")
    for name in ("digits_ddp", "digits_model"):
        sys.modules.pop(name, None)


def trained(example: ModuleType, group: ProcessGroup, xp: Any) -> tuple[list[float], float, list[bytes]]:
    """Losses, accuracy and weights after two epochs on drawn digits."""
    random = np.random.default_rng(5)
    images, labels = random.random((150, 64), np.float32), random.integers(0, 10, 150)
    data = example.Digits(images[30:], labels[30:], images[:30], labels[:30])
    ddp = ferrorpc.DistributedDataParallel(example.DigitsNet((64, 48, 10), seed=group.rank, xp=xp), group)
    options = argparse.Namespace(epochs=2, seed=3, rate=0.1)
    curve = example.train(ddp, data, group, options, xp)
    return curve, example.accuracy(ddp, data, group, xp), [each.data.tobytes() for each in ddp.parameters()]


@pytest.mark.parametrize("kind", [None, NcclBackend, HybridBackend], ids=["simulated", "nccl", "hybrid"])
def test_on_gpus_it_gets_the_weights_that_it_gets_on_the_host(
    cupy: StandIn, example: ModuleType, kind: type[DeviceBackend] | None
) -> None:
    def on_gpu(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            return trained(example, group, example.array_module("gpu"))

    wanted = run_groups([ProcessGroup(lanes) for lanes in host_lanes(RANKS)], lambda group: trained(example, group, np))
    backends = list(host_lanes(RANKS)) if kind is None else list(nccl_backends(cupy, RANKS, kind=kind))
    found = run_groups([ProcessGroup(backend) for backend in backends], on_gpu)
    assert found == wanted
    assert found[0][2] == found[1][2]


def test_without_cupy_it_says_what_to_install(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match=r"needs CuPy: .*pip install 'ferrorpc\[gpu\]'"):
        example.array_module("gpu")
    assert example.array_module("cpu") is np


def test_the_profile_gpu_of_compose_trains_on_gpus() -> None:
    service = yaml.safe_load((EXAMPLES.parent / "docker-compose.yml").read_text())["services"]["gpu"]
    assert service["entrypoint"] == ["ferrorpc", "run", "--nproc-per-node", "gpu", "-m"]
    assert service["command"][:3] == ["digits_ddp", "--device", "gpu"]
    assert service["build"]["args"]["EXTRAS"] == "examples,gpu"
