"""The CUDA kernels on a real GPU: the bits of their references, whatever the elements are and wherever arrays begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.kernels.cuda.codecs import DEVICE_CODECS
from ferrorpc.kernels.cuda.launcher import CHUNK, PEERS, ROWS, DeviceKernels
from ferrorpc.kernels.cuda.program import NAMES, PAIRS
from ferrorpc.testing.gpu import reference
from ferrorpc.types import DType
from ferrorpc.wire.codecs import codec
from tests.gpu.without import skip_without_gpu

skip_without_gpu()
pytestmark = pytest.mark.gpu
DTYPES = tuple(NAMES)
COUNTS = (1, 7, 0, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 100_003)
MARGIN = 3
"""Elements before, between and after what a kernel writes, which have to stay as they are: so places are odd ones."""

Array = np.ndarray[Any, Any]


@pytest.fixture
def kernels(cupy: Any) -> DeviceKernels:
    return device_of(cupy, 0).kernels


def drawn(dtype: DType, count: int, salt: int) -> Array:
    """Any bits at all: NaN of every kind, infinities and subnormals among them; every other one an ordinary number."""
    chance = np.random.default_rng(salt)
    found = chance.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype.storage)
    found[::2] = reference.narrowed(chance.standard_normal(count).astype(np.float32), dtype)[::2]
    if dtype is DType.FLOAT32:  # on and beside the boundaries of halves
        found[1::4] = (found[1::4].view(np.uint32) & 0xFFFF_F000 | chance.integers(0, 3, found[1::4].size, np.uint32)).view(
            np.float32
        )
    return found


def floats(count: int, salt: int) -> Array:
    return drawn(DType.FLOAT32, count, salt)


def placed(cupy: Any, array: Array) -> tuple[Any, Any]:
    """A copy on the GPU that begins at an odd place; and all of the memory around it."""
    around = np.zeros(MARGIN, array.dtype)
    room = cupy.asarray(np.concatenate([around, array, around]))
    return room[MARGIN : MARGIN + array.size], room


def same_bits(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    differ = np.flatnonzero(found.view(f"u{found.itemsize}") != expected.view(f"u{found.itemsize}"))
    assert not differ.size, f"{differ.size} of {found.size}, first [{differ[0]}]: {found[differ[0]]} {expected[differ[0]]}"


def same_but_for_which_nan(found: Array, expected: Array, dtype: DType) -> None:
    """That the result of an addition is NaN is defined, which is not."""
    nan = np.isnan(reference.widened(expected, dtype))
    np.testing.assert_array_equal(np.isnan(reference.widened(found, dtype)), nan)
    same_bits(found[~nan], expected[~nan])


def starts_of(counts: Sequence[int]) -> list[int]:
    return [MARGIN * (place + 1) + sum(counts[:place]) for place in range(len(counts))]


@pytest.mark.parametrize(("of", "to"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_many_arrays_are_packed_and_unpacked(cupy: Any, kernels: DeviceKernels, of: DType, to: DType, scale: float) -> None:
    starts = starts_of(COUNTS)
    whole = starts[-1] + COUNTS[-1] + MARGIN
    arrays = [drawn(of, count, salt) for salt, count in enumerate(COUNTS)]
    bucket, expected = cupy.asarray(np.zeros(whole, to.storage)), np.zeros(whole, to.storage)
    kernels.pack([placed(cupy, array)[0] for array in arrays], starts, bucket, of, to, scale)
    reference.pack(arrays, starts, expected, of, to, scale)
    same_bits(cupy.asnumpy(bucket), expected)

    source = drawn(of, whole, 99)
    near = [placed(cupy, np.zeros(count, to.storage)) for count in COUNTS]
    kernels.unpack([place for place, _ in near], starts, cupy.asarray(source), of, to, scale)
    wanted = [np.zeros(count + 2 * MARGIN, to.storage) for count in COUNTS]
    reference.unpack([room[MARGIN:-MARGIN] for room in wanted], starts, source, of, to, scale)
    for (_, room), other in zip(near, wanted, strict=True):
        same_bits(cupy.asnumpy(room), other)


def test_more_arrays_than_a_launch_is_told_of(cupy: Any, kernels: DeviceKernels) -> None:
    counts = [place % 5 for place in range(2 * ROWS + 7)]
    arrays, starts = [floats(count, salt) for salt, count in enumerate(counts)], starts_of(counts)
    bucket, expected = cupy.zeros(starts[-1] + 8, np.float32), np.zeros(starts[-1] + 8, np.float32)
    kernels.pack([cupy.asarray(array) for array in arrays], starts, bucket, DType.FLOAT32, DType.FLOAT32)
    reference.pack(arrays, starts, expected, DType.FLOAT32, DType.FLOAT32, 1.0)
    same_bits(cupy.asnumpy(bucket), expected)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_every_half_widens_and_comes_back(cupy: Any, kernels: DeviceKernels, dtype: DType) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    wide, back = cupy.zeros(halves.size, np.float32), cupy.asarray(np.zeros_like(halves))
    kernels.pack([cupy.asarray(halves)], [0], wide, dtype, DType.FLOAT32)
    expected = np.zeros(halves.size, np.float32)
    reference.pack([halves], [0], expected, dtype, DType.FLOAT32, 1.0)
    same_bits(cupy.asnumpy(wide), expected)
    kernels.pack([wide], [0], back, DType.FLOAT32, dtype)
    again = np.zeros_like(halves)
    reference.pack([expected], [0], again, DType.FLOAT32, dtype, 1.0)
    same_bits(cupy.asnumpy(back), again)


def blocks() -> dict[str, Array]:
    ordinary = np.random.default_rng(9).standard_normal(100_003).astype(np.float32)
    damaged = ordinary.copy()
    damaged[[5, 700, 100_002]] = np.nan, -np.inf, np.inf
    with np.errstate(under="ignore"):
        tiny = ordinary * np.float32(1e-42)
    return {
        "ordinary": ordinary,
        "subnormal": tiny,
        "largest": np.full(300, np.finfo(np.float32).max, np.float32),
        "damaged": damaged,
        "ties": np.array([127.0, 0.5, 1.5, -2.5, 63.5], np.float32),
        "zeros": np.zeros(256, np.float32),
        "any bits": floats(100_003, 4),
        "none": np.zeros(0, np.float32),
    }


@pytest.mark.parametrize("name", list(blocks()))
def test_blocks_of_int8_there_and_back(cupy: Any, kernels: DeviceKernels, name: str) -> None:
    values = blocks()[name]
    scales, integers = reference.quantise_int8(values)
    near_scales, near_integers = cupy.zeros(scales.size, np.float32), placed(cupy, np.full(values.size, -1, np.int8))[0]
    kernels.quantise_int8(placed(cupy, values)[0], near_scales, near_integers)
    same_bits(cupy.asnumpy(near_scales), scales)
    same_bits(cupy.asnumpy(near_integers), integers)
    found, room = placed(cupy, np.zeros_like(values))
    kernels.dequantise_int8(near_scales, near_integers, found)
    expected = np.zeros(values.size + 2 * MARGIN, np.float32)
    expected[MARGIN : MARGIN + values.size] = reference.dequantise_int8(scales, integers)
    same_but_for_which_nan(cupy.asnumpy(room), expected, DType.FLOAT32)


@pytest.mark.parametrize("name", DEVICE_CODECS)
def test_messages_are_those_of_the_host(cupy: Any, kernels: DeviceKernels, name: str) -> None:
    values, near, host = floats(100_003, 2), DEVICE_CODECS[name], codec(name)
    wanted = host.encode(values)
    encoded = cupy.zeros(wanted.size, np.uint8)
    near.encode(kernels, cupy.asarray(values), encoded)
    assert cupy.asnumpy(encoded).tobytes() == wanted.tobytes()
    found = cupy.zeros(values.size, np.float32)
    near.decode(kernels, encoded, found)
    same_but_for_which_nan(cupy.asnumpy(found), host.decode(wanted, values.size), DType.FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 8, PEERS + 3])
def test_peers_are_summed_in_rank_order(cupy: Any, kernels: DeviceKernels, dtype: DType, size: int) -> None:
    for count, divisor in ((1, 1.0), (CHUNK + 5, float(size)), (50_001, 2.5)):
        peers = [drawn(dtype, count, salt) for salt in range(size)]
        near = [placed(cupy, peer)[0] for peer in peers]
        kernels.sum_peers(near, near[-1], dtype, divisor)
        same_but_for_which_nan(cupy.asnumpy(near[-1]), reference.sum_peers(peers, dtype, divisor), dtype)


@pytest.mark.parametrize("damage", [0.0, np.inf, np.nan])
@pytest.mark.parametrize("size", [1e-40, 1.0])
def test_what_was_not_delivered_is_kept_unless_it_is_damaged(
    cupy: Any, kernels: DeviceKernels, damage: float, size: float
) -> None:
    chance = np.random.default_rng(1)
    with np.errstate(under="ignore"):
        values, delivered = (chance.standard_normal(50_001).astype(np.float32) * np.float32(size) for _ in range(2))
    values[49_000] += np.float32(damage)
    there, room = placed(cupy, values)
    kernels.residue(there, placed(cupy, delivered)[0])
    expected = np.zeros(values.size + 2 * MARGIN, np.float32)
    expected[MARGIN:-MARGIN] = reference.residue(values, delivered)
    same_bits(cupy.asnumpy(room), expected)
    assert expected.any() == (damage == 0)
