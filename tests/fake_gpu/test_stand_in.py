"""The stand-in for CuPy has nothing that CuPy has not, and takes nothing that CuPy refuses."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.testing.gpu.machine import GpuFault
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import DType

OWN = {"fake", "driver", "cupy", "machine", "gpu", "stream", "thread", "launch", "apply", "lying", "seen"}
OWN |= {"exchange_capture_mode"}
"""What the stand-in has for itself."""
OF_OBJECTS = {"ptr"}
"""What CuPy's objects have, but not their classes."""


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
    assert [name for name in names(fake_cuda.driver) if not hasattr(real.cuda.driver, name)] == []
    for name, fake in fake_classes.items():
        methods = {each for base in inspect.getmro(fake)[:-1] for each in names(base)}
        assert [each for each in methods - OF_OBJECTS if not hasattr(getattr(real.cuda, name), each)] == [], name
    array = {each for base in inspect.getmro(cupy.ndarray)[:-1] for each in names(base)}
    assert [each for each in array if not hasattr(real.ndarray, each)] == []


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "an array in place of a number": lambda cupy, x: bool(x),
    "a list": lambda cupy, x: x.__setitem__(..., [1, 2, 3]),
    "a NumPy array": lambda cupy, x: x.__setitem__(..., np.ones(3)),
    "complex into real": lambda cupy, x: x.__setitem__(..., 1j),
    "floats into integers": lambda cupy, x: x.__itruediv__(2),
    "a function of a NumPy array": lambda cupy, x: cupy.tanh(np.ones(3)),
    "a device that is not there": lambda cupy, x: cupy.cuda.Device(99).use(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cupy_refuses_is_refused(cupy: StandIn, what: str) -> None:
    with pytest.raises((TypeError, ValueError, cupy.cuda.runtime.CUDARuntimeError)):
        REFUSED[what](cupy, cupy.asarray(np.arange(3)))


def test_arrays_lie_as_cupys_do(cupy: StandIn) -> None:
    x = cupy.asarray(np.zeros((2, 3), order="F"))
    assert x.strides == cupy.zeros_like(x).strides == (8, 16)
    assert x.copy().strides == (24, 8)
    assert cupy.empty((0, 3)).data.ptr == 0


def _real_cupy() -> Any:
    own = sys.modules.pop("cupy")
    try:
        return importlib.import_module("cupy")
    finally:
        sys.modules["cupy"] = own


def test_who_waits_for_a_mark_still_waits_for_it_when_the_event_marks_something_else(cupy: StandIn) -> None:
    """As in CUDA: an event is recorded again while a stream waits for what it marked before, in another stream."""
    event, first, second, waiting = cupy.cuda.Event(), *(cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    released: list[bool] = []
    first.fake.enqueue(lambda: bool(released))
    event.record(first)
    waiting.wait_event(event)
    event.record(second)
    after = cupy.cuda.Event()
    after.record(waiting)
    cupy.machine.settle()
    assert event.done, "the latest mark, which nothing holds up"
    assert not after.done
    released.append(True)
    cupy.machine.settle()
    assert after.done


def test_a_gpu_that_has_failed_takes_no_kernel(cupy: StandIn) -> None:
    x = cupy.asarray(np.ones(3, np.float32))
    kernels = device_of(cupy, 0).kernels
    cupy.machine.failure = 700
    for launch in (lambda: x + 1, lambda: kernels.sum_peers([x], x, DType.FLOAT32)):
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="700"):
            launch()
    cupy.machine.failure = 0


def test_a_gpu_that_has_failed_says_so_to_every_call_but_those_that_free(cupy: StandIn) -> None:
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    address, event = runtime.malloc(4), runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    cupy.machine.failure = 700
    for call in (
        lambda: cuda.Device(0).use(),
        lambda: runtime.eventCreateWithFlags(runtime.eventDisableTiming),
        lambda: runtime.eventSynchronize(event),
        lambda: runtime.malloc(4),
        lambda: cuda.alloc_pinned_memory(4),
        lambda: cuda.Stream(non_blocking=True),
        cuda.Event,
    ):
        with pytest.raises(runtime.CUDARuntimeError, match="700"):
            call()
    runtime.eventDestroy(event)
    runtime.free(address)
    cupy.machine.failure = 0


def test_only_events_that_were_made_with_timing_tell_the_time_between_them(cupy: StandIn) -> None:
    timed, other = cupy.cuda.Event(), cupy.cuda.Event(disable_timing=True)
    for event in (timed, other):
        event.record()
    cupy.machine.settle()
    assert cupy.cuda.get_elapsed_time(timed, timed) == 0.0
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.get_elapsed_time(timed, other)


def test_memory_of_another_process_is_there_until_it_is_closed_and_must_not_be_freed_before(cupy: StandIn) -> None:
    runtime, gpu = cupy.cuda.runtime, cupy.machine.gpus[0]
    address, event = runtime.malloc(4), runtime.eventCreateWithFlags(runtime.eventDisableTiming | runtime.eventInterprocess)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        runtime.ipcGetMemHandle(address + 1)
    opened, kept = (runtime.ipcOpenMemHandle(runtime.ipcGetMemHandle(address)) for _ in range(2))
    assert len({address, opened, kept}) == 3, "each process has an address of its own for it"
    gpu.bytes_at(address, 4)[:] = 7
    assert gpu.bytes_at(opened + 1, 2).tolist() == [7, 7]
    runtime.ipcCloseMemHandle(opened)
    with pytest.raises(GpuFault, match="illegal address"):
        gpu.bytes_at(opened, 1)
    with pytest.raises(GpuFault, match="is not open"):
        runtime.ipcCloseMemHandle(opened)
    theirs = runtime.ipcOpenEventHandle(runtime.ipcGetEventHandle(event))
    runtime.streamWaitEvent(0, theirs)
    runtime.eventDestroy(event)
    with pytest.raises(GpuFault, match="has destroyed it"):
        runtime.streamWaitEvent(0, theirs)
    runtime.free(address)
    assert "while another process had it open" in str(cupy.machine.faults.pop())
