"""The layout of parameters into buckets."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given, strategies as st

from ferrorpc.ddp.bucket import ALIGNMENT_BYTES, FIRST_BUCKET_BYTES, lay_out
from ferrorpc.errors import UsageError
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION

MIB = 1 << 20


def f32(*shape: int) -> TensorSpec:
    return TensorSpec(DType.FLOAT32, shape)


def names(layout) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in layout.buckets]


def test_buckets_are_filled_from_the_last_parameter_to_the_first():
    layout = lay_out([("a", f32(10)), ("b", f32(20)), ("c", f32(30))], cap_bytes=MIB)
    assert names(layout) == [["c", "b", "a"]]
    assert [(s.flag, s.start, s.stop) for s in layout.buckets[0].slots] == [(0, 16, 46), (1, 48, 68), (2, 80, 90)]
    assert (layout.buckets[0].weight, layout.buckets[0].header, layout.buckets[0].count) == (3, 16, 90)


def test_first_and_last_bucket_are_small_and_the_others_go_to_the_cap():
    quarter = f32(MIB // 16)  # a quarter of a MiB
    layout = lay_out([(f"p{i}", quarter) for i in range(28)], cap_bytes=2 * MIB)
    assert [len(bucket.slots) for bucket in layout.buckets] == [4, 8, 8, 4, 4]
    assert (layout.buckets[0].count - layout.buckets[0].header) * 4 == FIRST_BUCKET_BYTES


def test_another_order_than_the_reverse_may_be_expected():
    parameters = [("a", f32(100)), ("b", f32(100)), ("c", f32(100))]
    layout = lay_out(parameters, cap_bytes=800, order=["b", "c", "a"])
    assert names(layout) == [["b", "c"], ["a"]]
    assert layout.text != lay_out(parameters, cap_bytes=800).text
    for order in (["a", "b"], ["a", "b", "c", "c"], ["a", "b", "x"], [0, 1, 2]):
        with pytest.raises(UsageError, match="order="):
            lay_out(parameters, cap_bytes=800, order=order)


def test_a_cap_below_the_first_buckets_own_holds_for_all():
    layout = lay_out([(f"p{i}", f32(100)) for i in range(4)], cap_bytes=800)
    assert [len(bucket.slots) for bucket in layout.buckets] == [2, 2]


def test_a_parameter_larger_than_the_cap_is_alone():
    layout = lay_out([("small", f32(1)), ("huge", f32(10 * MIB)), ("last", f32(1))], cap_bytes=MIB)
    assert names(layout) == [["last"], ["huge"], ["small"]]


def test_the_last_bucket_is_cut_where_it_comes_nearest_to_halves():
    sixteenths = [2, 5, 3, 4, 30]  # of a MiB
    layout = lay_out([(f"p{i}", f32(MIB // 64 * size)) for i, size in enumerate(sixteenths)], 50 * MIB // 16, MIB // 4)
    assert names(layout) == [["p4"], ["p3", "p2"], ["p1"], ["p0"]]


def test_one_cap_for_all_cuts_nothing():
    layout = lay_out([(f"p{i}", f32(MIB // 16)) for i in range(20)], 2 * MIB, 2 * MIB)
    assert [len(bucket.slots) for bucket in layout.buckets] == [8, 8, 4]


def test_dtypes_never_share_a_bucket_and_buckets_are_in_the_order_they_get_full():
    half = TensorSpec(DType.FLOAT16, (4,))
    layout = lay_out([("a", f32(4)), ("b", half), ("c", f32(4)), ("d", half)], cap_bytes=MIB)
    assert names(layout) == [["d", "b"], ["c", "a"]]
    assert [bucket.dtype for bucket in layout.buckets] == [DType.FLOAT16, DType.FLOAT32]


def test_nothing_gives_no_buckets_and_empty_parameters_have_a_place():
    assert lay_out([], cap_bytes=MIB).buckets == ()
    layout = lay_out([("none", f32(0)), ("scalar", f32())], cap_bytes=MIB)
    assert (layout.slots["none"].start, layout.slots["none"].stop) == (32, 32)
    assert layout.slots["scalar"].stop == 17


def test_text_tells_names_dtypes_shapes_order_and_cap_apart():
    base = [("a", f32(2, 3)), ("b", f32(4))]
    texts = {
        lay_out(parameters, cap_bytes=cap).text
        for parameters, cap in [
            (base, MIB),
            (base, 2 * MIB),
            (base[::-1], MIB),
            ([("a", f32(3, 2)), base[1]], MIB),
            ([("x", f32(2, 3)), base[1]], MIB),
            ([("a", TensorSpec(DType.FLOAT64, (2, 3))), base[1]], MIB),
        ]
    }
    assert len(texts) == 6
    assert lay_out(list(base), cap_bytes=MIB).text in texts


specs = st.tuples(
    st.sampled_from([DType.FLOAT32, DType.FLOAT16, DType.COMPLEX64]), st.lists(st.integers(0, 40), max_size=2).map(tuple)
).map(lambda pair: TensorSpec(*pair))


@given(st.lists(specs, max_size=30), st.integers(1, 5000))
def test_every_parameter_has_exactly_one_place_and_no_bucket_passes_the_cap(shapes, cap):
    parameters = [(f"p{i}", spec) for i, spec in enumerate(shapes)]
    layout = lay_out(parameters, cap_bytes=cap)
    assert sorted(layout.slots) == sorted(name for name, _ in parameters)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        position = bucket.header
        assert bucket.weight < bucket.header
        assert [slot.flag for slot in bucket.slots] == list(range(len(bucket.slots)))
        for slot in bucket.slots:
            assert slot == layout.slots[slot.name]
            assert slot.spec.dtype is bucket.dtype
            assert slot.bucket == bucket.index
            assert position <= slot.start < position + ALIGNMENT_BYTES
            assert slot.start * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0
            position = slot.start + math.prod(slot.spec.shape)
            assert slot.stop == position
        assert position == bucket.count
        held = sum(slot.stop - slot.start for slot in bucket.slots)
        assert len(bucket.slots) == 1 or held * bucket.dtype.itemsize <= cap
    assert layout == lay_out(parameters, cap_bytes=cap)
    for own, bare in zip(layout.buckets, lay_out(parameters, cap_bytes=cap, with_header=False).buckets, strict=True):
        assert [(slot.start - own.header, slot.stop - own.header) for slot in own.slots] == [
            (slot.start, slot.stop) for slot in bare.slots
        ]
        assert (bare.header, bare.count) == (0, own.count - own.header)


def test_layouts_are_part_of_the_protocol():
    """A rank of another release that puts a gradient elsewhere would add others to it. Where this fails, raise
    DATA_PROTOCOL_VERSION, so that they refuse each other, and note the new digest beside it."""
    sizes = [1, 15, 16, 17, 1000, 40_000, 300_000, 3, 70_000]
    dtypes = [DType.FLOAT32, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64]
    parameters = [(f"p{i}", TensorSpec(dtypes[i % 4], (sizes[i % 9],))) for i in range(60)]
    forwards = [name for name, _ in parameters]
    layouts = [
        lay_out(parameters[:count], cap, order=order, with_header=with_header)
        for count in (1, 2, 7, 60)
        for cap in (1, 1 << 16, 1 << 20, 25 << 20)
        for order in (None, forwards[:count])
        for with_header in (True, False)
    ]
    buckets = [(bucket.index, bucket.header, bucket.count) for layout in layouts for bucket in layout.buckets]
    slots = [(slot.name, slot.bucket, slot.flag, slot.start, slot.stop) for layout in layouts for slot in layout.slots.values()]
    digest = hashlib.sha256(f"{buckets} {slots}".encode()).hexdigest()[:16]
    assert {DATA_PROTOCOL_VERSION: digest} == {5: "197ea8d3c8a9427c"}
