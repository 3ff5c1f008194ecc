"""CuPy arrays through lanes that read host memory: every operation takes them and gives them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.kinds import copy_of, kind_of, packed_bytes, view, view_out
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.operations.arguments import Arguments
from ferrorpc.testing import run_world
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.reference import check_same, every_dtype, reduced, values
from ferrorpc.types import DType, ReduceOp
from tests.fake_gpu.operations import every_operation

FLOAT = DType.FLOAT32


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_operation_takes_and_gives_back_cupy_arrays(cupy: StandIn, size: int) -> None:
    run_world(size, lambda group: every_operation(group, cupy), clock=SYSTEM_CLOCK)


def test_every_dtype_survives_the_way_there_and_back(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            for dtype in every_dtype():
                everyones = [values(dtype, (3, 5), rank) for rank in range(group.size)]
                found = group.all_reduce(cupy.asarray(everyones[group.rank]))
                assert (type(found), found.device.id) == (cupy.ndarray, group.rank)
                check_same(cupy.asnumpy(found), reduced(everyones, ReduceOp.SUM, dtype), dtype.label)

    run_world(2, body, clock=SYSTEM_CLOCK)


def test_a_near_view_copies_nothing_and_a_strided_one_is_made_contiguous(cupy: StandIn) -> None:
    x = cupy.asarray(values(FLOAT, (6, 4), 0))
    near = view(x, on_device=True)
    assert (near.data.data.ptr, near.borrowed, near.origin is x) == (x.data.ptr, True, True)
    strided = view(x[::2, 1:], on_device=True)
    assert not strided.borrowed
    check_same(cupy.asnumpy(strided.data), values(FLOAT, (6, 4), 0)[::2, 1:].copy(), "strided")


def test_out_on_the_device_is_checked_like_any_other(cupy: StandIn) -> None:
    x = cupy.asarray(np.zeros(6, np.float32))
    source = view(x, on_device=True)

    def out(array: Any) -> Any:
        return view_out(array, view(array, on_device=True).spec, on_device=True)

    assert out(x).is_in_place(source)
    assert not out(cupy.asarray(np.zeros(6, np.float32))).is_in_place(source)
    with pytest.raises(UsageError, match="overlaps"):
        out(x[1:5]).is_in_place(view(x[:4], on_device=True))
    assert not out(x[::2]).is_in_place(view(x[1::2], on_device=True)), "they lie between each other"
    assert not out(x[:0]).is_in_place(view(x[:0], on_device=True))
    with pytest.raises(TensorMismatchError):
        view_out(x, view(np.zeros(5, np.float32)).spec, on_device=True)
    shared = kind_of(x).out_on_device
    broadcast = cupy.ndarray((4,), np.float32, x.data, (0,))
    with pytest.raises(TensorMismatchError, match="share memory"):
        shared(broadcast, view(np.zeros(4, np.float32)).spec)


@pytest.mark.parametrize("on_device", [False, True], ids=["through the host", "on the device"])
def test_arrays_of_a_list_must_not_overlap(cupy: StandIn, on_device: bool) -> None:
    memory, arguments = cupy.asarray(np.zeros((4, 2), np.float32)), Arguments(on_device)
    for apart in ([memory[:2], memory[2:]], [memory[:, 0], memory[:, 1]], [memory[:0], memory[4:]]):
        arguments.list_result(apart, kind_of(memory), 2, [])
    with pytest.raises(UsageError, match="overlap"):
        arguments.list_result([memory[:2], memory[1:3]], kind_of(memory), 2, [])


def packed(array: Any) -> Any:
    return packed_bytes([(slice(0, array.nbytes), view(array, on_device=True))], array.nbytes)


@pytest.mark.parametrize("copied", [copy_of, packed])
def test_an_array_made_in_another_stream_may_be_dropped_once_it_was_copied(cupy: StandIn, copied: Callable[[Any], Any]) -> None:
    """Its memory returns in the order of the stream that made it, which does not wait for the one that reads it."""
    device = device_of(cupy, 0)
    maker, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with maker:
        array = cupy.asarray(np.full(64, 3.0, np.float32))
        made = device.adopt(maker).record()
    with reader:
        device.adopt(reader).wait(made)
        copy = copied(array)
    del array
    maker.fake.synchronize()
    reader.fake.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(copy).view(np.float32), np.full(64, 3.0, np.float32))
