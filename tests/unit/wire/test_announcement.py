"""Notices come back as what was announced, and strange bytes are a CodecError."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.announcement import INLINE_BYTES, pack, unpack
from ferrorpc.wire.frames import DIMENSION_MAX, NDIM_MAX, TOTAL_BYTES_MAX


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 4), (1,) * NDIM_MAX])
def test_a_small_array_travels_with_its_notice(dtype, shape):
    data = np.random.default_rng(1).integers(0, 2, shape).astype(dtype.storage)
    spec, found = unpack(pack(TensorSpec(dtype, shape), data))
    assert spec == TensorSpec(dtype, shape)
    assert found.tobytes() == data.tobytes()
    assert (found.dtype, found.shape) == (data.dtype, shape)


def test_a_large_array_is_only_announced():
    limit = np.zeros(INLINE_BYTES, np.uint8)
    assert unpack(pack(TensorSpec(DType.UINT8, limit.shape), limit))[1] is not None
    larger = np.zeros((INLINE_BYTES + 1, 1), np.uint8)
    spec = TensorSpec(DType.UINT8, larger.shape)
    announcement = pack(spec, larger)
    assert announcement.size < 64
    assert unpack(announcement) == (spec, None)


def test_an_array_of_too_many_dimensions_is_refused_by_its_sender():
    with pytest.raises(CodecError, match="33 dimensions"):
        pack(TensorSpec(DType.UINT8, (1,) * (NDIM_MAX + 1)), np.zeros(1, np.uint8))


def changed(at: int, value: int) -> np.ndarray:
    announcement = pack(TensorSpec(DType.INT32, (2, 2)), np.zeros((2, 2), np.int32))
    announcement[at] = value
    return announcement


def announced(*shape: int) -> np.ndarray:
    return pack(TensorSpec(DType.UINT8, shape), np.zeros(0, np.uint8))


def of_too_many_dimensions() -> np.ndarray:
    words = np.ones(1 + NDIM_MAX + 1, np.uint64)
    words[0] = DType.UINT8 | NDIM_MAX + 1 << 8
    return words.view(np.uint8)


STRANGE = {
    "empty": np.zeros(0, np.uint8),
    "short": np.zeros(7, np.uint8),
    "no dtype": changed(0, 0),
    "unknown dtype": changed(0, 99),
    "too many dimensions": changed(1, 200),
    "a dimension too many": of_too_many_dimensions(),
    "dimensions that do not fit": changed(1, 9),
    "another size": changed(8, 3),
    "huge dimension": announced(DIMENSION_MAX),
    "huge array": announced(TOTAL_BYTES_MAX >> 20, 2 << 20),
    "too long": np.append(changed(2, 0), np.zeros(1, np.uint8)),
}


@pytest.mark.parametrize("announcement", STRANGE.values(), ids=STRANGE)
def test_strange_bytes_are_refused(announcement):
    with pytest.raises(CodecError, match=r"an announcement of \d+ bytes"):
        unpack(announcement)
