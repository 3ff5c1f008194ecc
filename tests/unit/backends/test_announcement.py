"""What ranks say to each other before NCCL moves their arrays: it comes back as it was said, and anything else is refused."""

import struct

import numpy as np
import pytest

from ferrorpc.backends.device.announcement import Announced, pack, unpack
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import DIMENSION_MAX, NDIM_MAX

FLOAT32 = int(DType.FLOAT32)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    "specs",
    [
        (),
        (TensorSpec(DType.BOOL, ()),),
        (TensorSpec(DType.FLOAT32, (3, 0, 7)), TensorSpec(DType.COMPLEX128, (DIMENSION_MAX - 1,))),
        (TensorSpec(DType.INT8, (1,) * NDIM_MAX),) * 3,
    ],
)
@pytest.mark.parametrize("number", [-1, 0, 1 << 40])
def test_an_announcement_comes_back_as_it_was_made(number: int, specs: tuple[TensorSpec, ...], on_host: bool) -> None:
    assert unpack(pack(number, on_host, specs)) == Announced(number, on_host, specs)


def words(*values: int) -> np.ndarray:
    return np.frombuffer(struct.pack(f"<{len(values)}Q", *values), np.uint8)


@pytest.mark.parametrize(
    "message",
    [
        np.zeros(0, np.uint8),
        np.zeros(8, np.uint8),
        np.zeros(17, np.uint8),
        words(0, 1),
        words(0, (1 << 56) - 1),
        words(0, 1, 0),
        words(0, 1, 255),
        words(0, 1, FLOAT32 | 2 << 8, 3),
        words(0, 1, FLOAT32 | 1 << 8, DIMENSION_MAX),
        words(0, 1, FLOAT32 | (NDIM_MAX + 1) << 8, *(1,) * (NDIM_MAX + 1)),
        words(0, 2, FLOAT32 | 1 << 8, 3),
        words(0, 1, FLOAT32 | 1 << 8, 3, 3),
    ],
)
def test_what_is_no_announcement_is_refused(message: np.ndarray) -> None:
    with pytest.raises(CodecError):
        unpack(message)
