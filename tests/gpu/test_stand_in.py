"""The stand-in for CuPy has nothing that CuPy has not: what passes over it does not fail on a name."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ferrorpc.testing.gpu.stand_in import StandIn

OWN = {"fake", "cupy", "machine", "gpu", "stream", "thread", "launch", "apply", "seen"}
"""What the stand-in has for itself."""


def names(thing: Any) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")} - OWN


def test_every_name_of_the_stand_in_is_one_of_cupys(cupy: StandIn) -> None:
    fake_cuda, fake_runtime = vars(cupy)["cuda"], vars(cupy)["cuda"].runtime
    fake_classes = {name: each for name, each in vars(fake_cuda).items() if inspect.isclass(each)}
    found = SimpleNamespace(cuda=names(fake_cuda), runtime=names(fake_runtime), module=names(cupy) | names(StandIn))
    assert {"Stream", "Event", "Device", "alloc_pinned_memory"} <= found.cuda
    assert {"memcpyAsync", "getDeviceProperties", "getDeviceCount"} <= found.runtime
    try:
        real = _real_cupy()
    except ImportError:
        pytest.skip("CuPy is not installed (ferrorpc[gpu])")
    assert [name for name in found.module if not hasattr(real, name)] == []
    assert [name for name in found.cuda if not hasattr(real.cuda, name)] == []
    assert [name for name in found.runtime if not hasattr(real.cuda.runtime, name)] == []
    for name, fake in fake_classes.items():
        methods = {each for base in inspect.getmro(fake)[:-1] for each in names(base)}
        assert [each for each in methods if not hasattr(getattr(real.cuda, name), each)] == [], name
    array = {each for base in inspect.getmro(cupy.ndarray)[:-1] for each in names(base)}
    assert [each for each in array if not hasattr(real.ndarray, each)] == []


def _real_cupy() -> Any:
    own = sys.modules.pop("cupy")
    try:
        return importlib.import_module("cupy")
    finally:
        sys.modules["cupy"] = own
