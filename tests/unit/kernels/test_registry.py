"""The registry takes the fastest loaded converter that passes the self-test, and makes one for each thread."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from ferrorpc.kernels import registry
from ferrorpc.kernels.half import NumpyBFloat16, NumpyFloat16
from ferrorpc.kernels.half_torch import TorchFloat16
from ferrorpc.kernels.self_test import is_exact
from ferrorpc.types import DType, ReduceOp

HALVES = (DType.FLOAT16, DType.BFLOAT16)
NUMPY = {DType.FLOAT16: NumpyFloat16, DType.BFLOAT16: NumpyBFloat16}


@pytest.fixture
def fresh(monkeypatch):
    """A registry with an empty cache."""
    monkeypatch.setattr(registry, "_CACHE", registry._Cache())
    registry._is_exact.cache_clear()
    yield
    registry._is_exact.cache_clear()


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_numpy_is_used_if_nothing_else_is_loaded(fresh, monkeypatch, dtype):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    assert list(registry.available(dtype)) == ["numpy"]
    assert type(registry.converter(dtype)) is NUMPY[dtype]
    assert registry.converter(dtype) is registry.converter(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_a_torch_that_a_program_blocks_is_none(fresh, monkeypatch, dtype):
    """It stands in sys.modules as None then. A converter was made for each use."""
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert type(registry.converter(dtype)) is NUMPY[dtype]
    assert registry.converter(dtype) is registry.converter(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_torch_is_used_as_soon_as_it_is_loaded(fresh, monkeypatch, dtype):
    torch = pytest.importorskip("torch")
    monkeypatch.delitem(sys.modules, "torch")
    first = registry.converter(dtype)
    assert not isinstance(first, TorchFloat16)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert isinstance(registry.converter(dtype), TorchFloat16)


def test_reductions_import_neither_torch_nor_ml_dtypes():
    code = (
        "import sys, numpy as np\n"
        "from ferrorpc.kernels.reduction import kernel\n"
        "from ferrorpc.types import DType, ReduceOp\n"
        "for dtype in (DType.FLOAT16, DType.BFLOAT16):\n"
        "    ones = np.ones(70_000, np.float16).view(dtype.storage)\n"
        "    kernel(ReduceOp.SUM, dtype, 2).reduce([ones, ones], ones.copy())\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_a_torch_that_is_being_imported_is_not_touched_yet(fresh, monkeypatch, dtype):
    partial = types.ModuleType("torch")
    partial.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    partial.__spec__._initializing = True
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    monkeypatch.setitem(sys.modules, "torch", partial)
    assert type(registry.converter(dtype)) is NUMPY[dtype]
    assert registry._CACHE.found[True][dtype] is None, "it is asked again once the import is done"


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_a_torch_without_the_needed_functions_is_skipped(fresh, monkeypatch, dtype):
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert type(registry.converter(dtype)) is NUMPY[dtype]
    assert registry._CACHE.found[True][dtype] is not None


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_a_converter_that_was_made_in_inference_mode_works_outside_of_it(fresh, dtype):
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        found = registry.converter(dtype)
    assert is_exact(found, NUMPY[dtype]())


def test_threads_have_converters_of_their_own():
    found = [registry.converter(DType.FLOAT16)]
    thread = threading.Thread(target=lambda: found.append(registry.converter(DType.FLOAT16)))
    thread.start()
    thread.join(30)
    assert found[0] is not found[1]
    assert not np.shares_memory(found[0].wide[0], found[1].wide[0])


def flushing_to_zero(base):
    """A converter that flushes subnormal float32 to zero, as some instructions do."""

    class Flushing(base):
        def narrow(self, block):
            wide = self.wide[0][: len(block)]
            wide[np.abs(wide) < np.finfo(np.float32).tiny] = 0
            super().narrow(block)

    return Flushing()


def rounding_up_ties(base):
    class RoundingUp(base):
        def narrow(self, block):
            wide = self.wide[0][: len(block)]
            tie = wide.view(np.uint32) & 0xFFFF == 0x8000
            wide.view(np.uint32)[tie & np.isfinite(wide)] += 1
            super().narrow(block)

    return RoundingUp()


def dropping_signs_of_nan(base):
    class Dropping(base):
        def widen(self, block, slot):
            values = super().widen(block, slot)
            values[np.isnan(values)] = np.nan
            return values

    return Dropping()


def folding_wrongly(base):
    """A converter whose `fold_two` reports half of the elements as done, but also writes to one of the others."""

    class Wrong(base):
        def fold_two(self, op, left, right, out):
            count = len(out) // 2
            out.view(np.uint16)[count] ^= op is ReduceOp.PRODUCT
            return count

    return Wrong()


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_the_self_test_accepts_the_reference_itself(dtype):
    assert is_exact(NUMPY[dtype](), NUMPY[dtype]())


@pytest.mark.parametrize("wrong", [rounding_up_ties, dropping_signs_of_nan, folding_wrongly])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_the_self_test_finds_what_differs(dtype, wrong):
    assert not is_exact(wrong(NUMPY[dtype]), NUMPY[dtype]())


def test_the_self_test_finds_flushed_subnormals():
    assert not is_exact(flushing_to_zero(NumpyBFloat16), NumpyBFloat16())
