"""Codecs against independent references: ml_dtypes for bfloat16, NumPy for binary16, a loop over blocks for int8."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.collectives.outgoing_message import CODED_VALUES
from ferrorpc.errors import CodecError, UsageError
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES
from ferrorpc.wire.codecs import CODEC_NAMES, codec

FLOAT_MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).smallest_subnormal)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, FLOAT_MAX, -FLOAT_MAX, TINY, -TINY, 1.0, -1.0, 65504.0, 65520.0, 1e-40, 6e-8]


def random_floats(count: int, seed: int = 0) -> np.ndarray:
    """Every kind of bit pattern, NaN, infinities and subnormals among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    values = bits.view(np.float32).copy()
    values[: len(SPECIAL)] = SPECIAL[:count]
    return values


def ordinary_floats(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 15, 16_384, 40_001])
def test_bf16_equals_ml_dtypes_on_every_kind_of_float(count: int) -> None:
    values = random_floats(count) if count >= len(SPECIAL) else ordinary_floats(count)
    encoded = codec("bf16").encode(values)
    assert encoded.dtype == np.uint8
    assert encoded.size == codec("bf16").encoded_bytes(count)
    decoded = codec("bf16").decode(encoded, count)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)
    assert np.array_equal(np.signbit(decoded), np.signbit(expected))


def test_bf16_rounds_ties_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    assert codec("bf16").encode(ties).view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


def test_bf16_keeps_every_nan_a_nan() -> None:
    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(codec("bf16").decode(codec("bf16").encode(patterns), patterns.size)).all()


def test_f16_equals_the_cast_of_numpy_and_overflows_to_infinity_without_a_warning() -> None:
    values = random_floats(5_000)
    decoded = codec("f16").decode(codec("f16").encode(values), values.size)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)
    assert np.isinf(decoded[SPECIAL.index(FLOAT_MAX)])


def blocks_by_loop(values: np.ndarray) -> np.ndarray:
    """The definition, one block at a time, in float64."""
    result = np.empty(values.size, np.float64)
    for start in range(0, values.size, BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES].astype(np.float64)
        if not np.isfinite(block).all():
            result[start : start + BLOCK_VALUES] = np.nan
            continue
        scale = max(float(np.float32(np.abs(block).max() / 127)), 2.0**-126)
        result[start : start + BLOCK_VALUES] = np.clip(np.rint(block / scale), -127, 127) * scale
    return result


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1_000, 16_384, 16_385, 50_001])
def test_int8_decodes_to_within_half_a_scale_of_every_value(count: int) -> None:
    values = ordinary_floats(count)
    encoded = codec("int8").encode(values)
    assert encoded.size == codec("int8").encoded_bytes(count) == 4 * -(-count // BLOCK_VALUES) + count
    decoded = codec("int8").decode(encoded, count)
    np.testing.assert_allclose(decoded, blocks_by_loop(values), rtol=0, atol=1.01 * np.abs(values).max(initial=0) / 127)
    for start in range(0, count, BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        bound = np.abs(block).max() / 127 / 2 * 1.0001
        assert np.abs(decoded[start : start + BLOCK_VALUES] - block).max() <= bound


def test_int8_of_integers_up_to_127_is_exact() -> None:
    values = np.arange(-127, 128).astype(np.float32)
    np.testing.assert_array_equal(codec("int8").decode(codec("int8").encode(values), values.size), values)


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_int8_shows_a_block_with_nan_or_infinity_and_leaves_the_others_alone(damage: float) -> None:
    values = ordinary_floats(3 * BLOCK_VALUES + 7)
    values[BLOCK_VALUES + 3] = damage
    decoded = codec("int8").decode(codec("int8").encode(values), values.size)
    assert np.isnan(decoded[BLOCK_VALUES : 2 * BLOCK_VALUES]).all()
    assert np.isfinite(np.delete(decoded, range(BLOCK_VALUES, 2 * BLOCK_VALUES))).all()
    again = codec("int8").encode(values)
    assert np.array_equal(again, codec("int8").encode(values))


@pytest.mark.parametrize("extreme", [FLOAT_MAX, -FLOAT_MAX, TINY, 1e-38, 0.0])
def test_int8_of_extreme_blocks_is_finite_and_close(extreme: float) -> None:
    values = np.full(BLOCK_VALUES, extreme, np.float32)
    values[1::2] /= 2
    decoded = codec("int8").decode(codec("int8").encode(values), values.size)
    assert np.isfinite(decoded).all()
    scale = max(abs(extreme) / 127, 2.0**-126)
    assert np.abs(decoded.astype(np.float64) - values).max() <= scale / 2 * 1.0001 + abs(extreme) * 1e-6


def int8_by_the_table(values: np.ndarray) -> bytes:
    """The bytes as the format says, block by block, with NumPy's arithmetic in float32."""
    scales, integers = [], []
    largest_scale = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
    with np.errstate(all="ignore"):
        for start in range(0, values.size, BLOCK_VALUES):
            block = values[start : start + BLOCK_VALUES]
            sound = bool(np.isfinite(block).all())
            scale = np.clip(np.abs(block).max() / np.float32(127), np.float32(2.0**-126), largest_scale)
            scales.append(scale if sound else np.float32(np.nan))
            rounded = np.clip(np.rint(block / scale), -127, 127)
            integers.append((rounded if sound else np.zeros_like(block)).astype(np.int8))
    return b"".join([*(scale.astype(np.float32).tobytes() for scale in scales), *(part.tobytes() for part in integers)])


@pytest.mark.parametrize("count", [0, 1, 256, 24_576, 24_577, 60_000])
def test_int8_has_exactly_the_bytes_of_the_format(count: int) -> None:
    values = random_floats(count) if count >= len(SPECIAL) else ordinary_floats(count)
    values[: count // 2] = ordinary_floats(count // 2)
    extreme = np.where(np.arange(count) % 600 < 300, values, np.float32(FLOAT_MAX))
    for given in (values, np.nan_to_num(values, nan=1.0, posinf=3.0, neginf=-3.0), extreme):
        assert codec("int8").encode(given).tobytes() == int8_by_the_table(given)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_rounding_again_changes_nothing(name: str) -> None:
    chosen, chance = codec(name), np.random.default_rng(0)
    blocks = (400, max(256, chosen.block_values))
    with np.errstate(over="ignore"):
        spread = (chance.standard_normal(blocks) * 10.0 ** chance.integers(-46, 40, (400, 1))).astype(np.float32)
    for values in (random_floats(70_003), ordinary_floats(70_003), spread.reshape(-1), np.zeros(5, np.float32)):
        once = chosen.decode(chosen.encode(values), values.size)
        np.testing.assert_array_equal(chosen.decode(chosen.encode(once), values.size), once)
    assert once.tobytes() == bytes(20)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_blocks_end_where_pieces_of_messages_do(name: str) -> None:
    assert CODED_VALUES % codec(name).block_values == 0


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("count", [0, 3, 256, 70_000])
def test_pieces_of_whole_blocks_give_the_values_of_one_message(name: str, count: int) -> None:
    chosen = codec(name)
    values = ordinary_floats(count)
    whole = chosen.decode(chosen.encode(values), count)
    piece = 3 * chosen.block_values
    found, total_bytes = np.full(count, np.nan, np.float32), 0
    for start in range(0, count, piece):
        part = values[start : start + piece]
        part.flags.writeable = False
        message = np.empty(chosen.encoded_bytes(part.size) + 1, np.uint8)[1:]
        message[:] = chosen.encode(part)
        message.flags.writeable = False
        found[start : start + piece] = chosen.decode(message, part.size)
        total_bytes += message.size
    assert total_bytes == chosen.encoded_bytes(count)
    assert found.tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_nothing_but_the_result_and_numpys_own_buffer_is_allocated_once_warm(name: str) -> None:
    chosen, values = codec(name), ordinary_floats(200_000)
    encoded = chosen.encode(values)
    chosen.decode(encoded, values.size)
    tracemalloc.start()
    try:
        chosen.encode(values)
        assert tracemalloc.get_traced_memory()[1] < encoded.nbytes + 40_000
        tracemalloc.reset_peak()
        chosen.decode(encoded, values.size)
        assert tracemalloc.get_traced_memory()[1] < values.nbytes + 40_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_bytes_of_another_size_are_refused(name: str) -> None:
    encoded = codec(name).encode(ordinary_floats(300))
    with pytest.raises(CodecError, match="300"):
        codec(name).decode(encoded[:-1], 300)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="bf16, f16, int8"):
        codec("fp4")
