"""The CUDA kernels: they compile for every architecture, and compute what their references in NumPy say, bit for bit.

What they compute is tried as C++ on the host (host_kernels.py); no test here runs on a GPU.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ferrorpc.kernels.cuda.launcher import CHUNK, PEERS, QUANTISE_THREADS, ROWS, peers_of
from ferrorpc.kernels.cuda.program import KERNELS, NAMES, PAIRS, source
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES
from ferrorpc.testing.gpu import reference
from ferrorpc.types import DType
from ferrorpc.wire.codecs import codec
from tests.fake_gpu.compiler import ARITHMETIC, compiled, machine_code
from tests.fake_gpu.host_kernels import HostKernels, addresses, rows

DTYPES = tuple(NAMES)
GRID, THREADS = (2, 1), 8


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_kernel_compiles(architecture: str) -> None:
    image = compiled(architecture)
    assert image[:4] == b"\x7fELF"
    assert sorted(machine_code(image)) == sorted(f".text.{name}" for name in KERNELS)


def test_the_machine_code_does_not_depend_on_how_cupy_or_its_user_compiles_arithmetic() -> None:
    """CuPy adds -ftz=true: subnormal floats would be zero."""
    assert machine_code(compiled("sm_90", *ARITHMETIC)) == machine_code(compiled("sm_90"))


def test_the_text_and_its_launcher_agree_on_sizes() -> None:
    said = {name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)$", source(), re.MULTILINE)}
    del said["BATCH"]
    known = {"CHUNK": CHUNK, "ROWS": ROWS, "PEERS": PEERS, "VALUES": BLOCK_VALUES, "LANES": QUANTISE_THREADS}
    assert said == known
    assert CHUNK % BLOCK_VALUES == 0


def every_half(dtype: DType) -> np.ndarray[Any, Any]:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)


def awkward_floats() -> np.ndarray[Any, Any]:
    """float32 on and beside every boundary between two values of either half type; NaN, infinity and subnormals among them."""
    upper = np.arange(0, 1 << 16, 3, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).reshape(-1).view(np.float32)


def same_bits(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert found.dtype == expected.dtype
    differ = np.flatnonzero(found.view(f"u{found.itemsize}") != expected.view(f"u{found.itemsize}"))
    assert differ.size == 0, (
        f"{differ.size} of {found.size} differ, first at {differ[0]}: {found[differ[0]]} {expected[differ[0]]}"
    )


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_every_half_value_widens_and_every_boundary_narrows_as_in_numpy(kernels: HostKernels, dtype: DType) -> None:
    name = NAMES[dtype]
    halves, floats = every_half(dtype), awkward_floats()
    wide, narrow = np.empty(halves.size, np.float32), np.empty(floats.size, dtype.storage)
    kernels.run(f"pack_{name}_f32", GRID, THREADS, *rows([halves], [0]), wide, 1.0)
    same_bits(wide, reference._scaled(reference.widened(halves, dtype), 1.0))
    kernels.run(f"pack_f32_{name}", GRID, THREADS, *rows([floats], [0]), narrow, 1.0)
    same_bits(narrow, reference.narrowed(floats, dtype))


@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_many_arrays_are_packed_and_unpacked_with_cast_and_scale(kernels: HostKernels, of: DType, to: DType) -> None:
    counts, starts, scale = [7, 0, 300, 1, 4097], [3, 10, 12, 320, 321], 1 / 3
    chance = np.random.default_rng(5)
    arrays = [reference.narrowed(chance.standard_normal(count).astype(np.float32), of) for count in counts]
    pair = f"{NAMES[of]}_{NAMES[to]}"
    bucket, expected = (np.zeros(4420, to.storage) for _ in range(2))
    kernels.run(f"pack_{pair}", GRID, THREADS, *rows(arrays, starts), bucket, scale)
    reference.pack(arrays, starts, expected, of, to, scale)
    same_bits(bucket, expected)
    source = reference.narrowed(chance.standard_normal(4420).astype(np.float32), of)
    found, wanted = ([np.zeros(count, to.storage) for count in counts] for _ in range(2))
    kernels.run(f"unpack_{pair}", GRID, THREADS, *rows(found, starts), source, scale)
    reference.unpack(wanted, starts, source, of, to, scale)
    for one, other in zip(found, wanted, strict=True):
        same_bits(one, other)


def awkward_blocks() -> list[np.ndarray[Any, Any]]:
    chance = np.random.default_rng(9)
    ordinary = chance.standard_normal(1000).astype(np.float32)
    tiny, huge = ordinary * np.float32(1e-42), np.full(300, np.finfo(np.float32).max, np.float32)
    damaged = ordinary.copy()
    damaged[5], damaged[700] = np.nan, -np.inf
    ties = np.array([127.0, 0.5, 1.5, -2.5, 63.5], np.float32)
    return [ordinary, tiny, huge, damaged, ties, np.zeros(256, np.float32), np.zeros(0, np.float32), ordinary[:257]]


@pytest.mark.parametrize("place", range(8))
def test_blocks_of_int8_are_those_of_the_wire(kernels: HostKernels, place: int) -> None:
    values = awkward_blocks()[place]
    scales, integers = reference.quantise_int8(values)
    wire = codec("int8").encode(values)
    assert np.concatenate([scales.view(np.uint8), integers.view(np.uint8)]).tobytes() == wire.tobytes()
    found_scales, found_integers = np.empty_like(scales), np.full(values.size, -1, np.int8)
    kernels.run("quantise_int8", GRID, 32, values, values.size, found_scales, found_integers)
    same_bits(found_scales, scales)
    same_bits(found_integers, integers)
    found = np.empty(values.size, np.float32)
    kernels.run("dequantise_int8", GRID, THREADS, scales, integers, values.size, found)
    expected = reference.dequantise_int8(scales, integers)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    whole = ~np.isnan(expected)
    same_bits(found[whole], expected[whole])
    decoded = codec("int8").decode(wire, values.size)
    same_bits(decoded[whole], expected[whole])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peers", [1, 2, 3, 8, PEERS + 2])
def test_peers_are_summed_in_rank_order_and_rounded_once(kernels: HostKernels, dtype: DType, peers: int) -> None:
    chance = np.random.default_rng(peers)
    arrays = [reference.narrowed(chance.standard_normal(501).astype(np.float32) * 100, dtype) for _ in range(peers)]
    for divisor in (1.0, float(peers), 2.5):
        out = np.empty(501, dtype.storage)
        places = addresses(arrays)
        told = (peers_of(places), np.array(places[PEERS:], np.uint64), peers)
        kernels.run(f"sum_peers_{NAMES[dtype]}", GRID, THREADS, *told, 501, out, divisor)
        same_bits(out, reference.sum_peers(arrays, dtype, divisor))
