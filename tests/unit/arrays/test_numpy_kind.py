"""NumPy arrays, numbers and DLPack objects: what goes in, what comes back, what is refused."""

from __future__ import annotations

import enum

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.arrays import base
from ferrorpc.arrays.kinds import NUMPY, kind_of, spec_of, view, view_out
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, TensorSpec


class Weekday(enum.IntEnum):
    WEDNESDAY = 3


ALL_DTYPES = [dtype for dtype in DType if dtype is not DType.BFLOAT16]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: d.label)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_contiguous_arrays_are_borrowed(dtype, shape):
    x = np.zeros(shape, dtype.storage)
    got = view(x)
    assert got.spec == TensorSpec(dtype, shape)
    assert got.borrowed
    assert got.data is x
    assert got.kind is NUMPY


def test_bfloat16_is_seen_as_its_bits_and_comes_back_as_itself():
    x = np.array([1.0, -2.5, np.nan], ml_dtypes.bfloat16)
    got = view(x)
    assert got.spec == TensorSpec(DType.BFLOAT16, (3,))
    assert got.data.dtype == np.uint16
    assert got.borrowed
    back = NUMPY.wrap(got.data.copy(), got.spec)
    assert back.dtype == x.dtype
    assert back.tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("number", "spec"),
    [
        (True, TensorSpec(DType.BOOL, ())),
        (3, TensorSpec(DType.INT64, ())),
        (Weekday.WEDNESDAY, TensorSpec(DType.INT64, ())),
        (2.5, TensorSpec(DType.FLOAT64, ())),
        (1 + 2j, TensorSpec(DType.COMPLEX128, ())),
        (np.float32(2.5), TensorSpec(DType.FLOAT32, ())),
        (np.uint8(7), TensorSpec(DType.UINT8, ())),
        (np.bool_(False), TensorSpec(DType.BOOL, ())),
    ],
)
def test_numbers_are_arrays_without_dimensions(number, spec):
    got = view(number)
    assert got.spec == spec
    assert spec_of(number) == spec
    assert got.data[()] == number


def test_strided_and_reversed_and_transposed_arrays_are_copied_in_order():
    x = np.arange(24.0).reshape(2, 3, 4)
    for y in (x[:, ::2], x[::-1], x.T, x[:, 1], np.broadcast_to(x[0, 0], (5, 4)), np.asfortranarray(x)):
        got = view(y)
        assert got.data.flags.c_contiguous
        assert not got.borrowed
        assert np.array_equal(got.data, y)


def test_read_only_arrays_are_read_and_results_are_writable():
    x = np.arange(3.0)
    x.flags.writeable = False
    got = view(x)
    back = NUMPY.wrap(got.data, got.spec)
    back[0] = 7
    assert back.flags.owndata
    assert x[0] == 0


def test_wrap_takes_over_an_array_that_owns_its_memory_and_copies_others():
    data = np.arange(6.0)
    assert NUMPY.wrap(data, TensorSpec(DType.FLOAT64, (6,))) is data
    shaped = NUMPY.wrap(data, TensorSpec(DType.FLOAT64, (2, 3)))
    assert shaped.flags.owndata
    assert shaped.shape == (2, 3)
    message = np.frombuffer(data.tobytes())
    assert NUMPY.wrap(message, TensorSpec(DType.FLOAT64, (6,))).flags.writeable


def test_wrap_takes_over_the_memory_of_a_bfloat16_array_that_owns_it_and_copies_others():
    data, spec = np.arange(6, dtype=np.uint16), TensorSpec(DType.BFLOAT16, (6,))
    taken, copied = NUMPY.wrap(data, spec), NUMPY.wrap(data[:], spec)
    assert taken.base is data
    assert not np.shares_memory(copied, data)
    for found in (taken, copied):
        assert found.dtype == ml_dtypes.bfloat16
        assert found.flags.writeable
        assert found.view(np.uint16).tolist() == data.tolist()


def test_empty_gives_the_wanted_array():
    assert NUMPY.empty((2, 3), DType.INT16).dtype == np.int16
    assert NUMPY.empty((0,), DType.BFLOAT16).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["datetime64[s]", "O", "U3", "V4", "float8_e4m3fn", "longdouble"])
def test_other_dtypes_are_refused_with_the_list(dtype):
    kind = ml_dtypes.float8_e4m3fn if dtype.startswith("float8") else dtype
    with pytest.raises(TensorMismatchError, match=r"bool, int8, .*complex128"):
        view(np.zeros(2, kind))


def test_foreign_byte_order_is_refused():
    with pytest.raises(TensorMismatchError, match="native byte order"):
        view(np.zeros(2, ">f4"))


def test_numbers_beyond_int64_and_lists_and_masks_are_refused_with_what_to_try():
    with pytest.raises(TensorMismatchError, match="as a float"):
        view(2**70)
    with pytest.raises(UsageError, match="asarray"):
        view([1.0, 2.0])
    with pytest.raises(UsageError, match="filled"):
        view(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


class Foreign:
    """Another library's array: DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **more):
        return self.array.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Elsewhere(Foreign):
    """As an array on a device that NumPy cannot read."""

    def __dlpack__(self, **more):
        raise BufferError("it is on device 7")


def test_objects_that_speak_dlpack_are_read_and_numpy_comes_back():
    x = Foreign(np.arange(6.0).reshape(2, 3))
    got = view(x)
    assert kind_of(x) is NUMPY
    assert np.array_equal(got.data, x.array)
    assert type(NUMPY.wrap(got.data, got.spec)) is np.ndarray


class JaxArray(Foreign):
    """As JAX's arrays: what NumPy does not take through DLPack they give as an array of ml_dtypes' types."""

    @property
    def dtype(self):
        return self.array.dtype

    def __dlpack__(self, **more):
        raise BufferError("Unsupported dtype in DLTensor.")

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_bfloat16_of_a_library_that_speaks_dlpack_is_read():
    got = view(JaxArray(np.array([1.0, -2.5], ml_dtypes.bfloat16)))
    assert (got.kind, got.spec) == (NUMPY, TensorSpec(DType.BFLOAT16, (2,)))
    assert got.data.view(ml_dtypes.bfloat16).tolist() == [1.0, -2.5]


def test_dtypes_that_dlpack_has_no_name_for_are_refused_with_the_list():
    with pytest.raises(TensorMismatchError, match=r"float8_e4m3fn is not supported(.|\n)*try: .*bfloat16"):
        view(JaxArray(np.zeros(2, ml_dtypes.float8_e4m3fn)))


def test_dlpack_objects_out_of_reach_say_why():
    with pytest.raises(TensorMismatchError, match="device 7"):
        view(Elsewhere(np.zeros(2)))


# out


def test_contiguous_out_is_written_directly():
    out = np.zeros((2, 3))
    place = view_out(out, TensorSpec(DType.FLOAT64, (2, 3)))
    assert place.data is out
    assert place.commit() is out


def test_strided_out_is_written_at_commit():
    base = np.zeros((3, 4))
    out = base[:, ::2]
    place = view_out(out, TensorSpec(DType.FLOAT64, (3, 2)))
    place.data[...] = 5.0
    assert not base.any()
    assert place.commit() is out
    assert np.array_equal(base, [[5, 0, 5, 0]] * 3)


def test_bfloat16_out_is_written_by_bits():
    out = np.zeros(4, ml_dtypes.bfloat16)
    place = view_out(out[::2], TensorSpec(DType.BFLOAT16, (2,)))
    place.data[...] = 0x3F80
    place.commit()
    assert out.astype(np.float32).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "out",
    [np.zeros(3, np.float32), np.zeros(4), np.zeros((3, 1)), np.broadcast_to(np.zeros(1), (3,)), np.frombuffer(bytes(24))],
    ids=["dtype", "length", "dimensions", "broadcast", "read-only"],
)
def test_out_that_does_not_fit_is_refused(out):
    with pytest.raises(TensorMismatchError):
        view_out(out, TensorSpec(DType.FLOAT64, (3,)))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3,), (0,)), ((4, 3), (8, 8)), ((3, 4), (-8, 8)), ((2, 3), (16, 8)), ((3, 1, 2), (8, 0, 8)), ((3,), (4,))],
)
def test_out_whose_elements_share_memory_is_refused(shape, strides):
    out = np.lib.stride_tricks.as_strided(np.zeros(12)[6:], shape, strides)
    with pytest.raises(TensorMismatchError, match="share memory"):
        view_out(out, TensorSpec(DType.FLOAT64, shape))


@pytest.mark.parametrize("index", [np.s_[::2, ::-1], np.s_[:, 1], np.s_[::-1], np.s_[1:2, :, ::3], np.s_[..., None, 0]])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_out_may_be_any_cut_of_an_array(index, axes):
    out = np.zeros((3, 4, 5)).transpose(axes)[index]
    view_out(out, TensorSpec(DType.FLOAT64, out.shape))


def test_out_without_elements_is_fine():
    out = np.zeros((0, 2))
    assert view_out(out, TensorSpec(DType.FLOAT64, (0, 2))).commit() is out


def test_out_must_be_an_array():
    with pytest.raises(UsageError, match="list"):
        view_out([0.0], TensorSpec(DType.FLOAT64, (1,)))
    with pytest.raises(UsageError, match="masked"):
        view_out(np.ma.masked_array([0.0], [True]), TensorSpec(DType.FLOAT64, (1,)))


def test_the_input_itself_is_in_place_and_partial_overlap_is_refused():
    base = np.zeros(10)
    x = view(base[:6])
    spec = x.spec
    assert view_out(base[:6], spec).is_in_place(x)
    assert not view_out(np.zeros(6), spec).is_in_place(x)
    with pytest.raises(UsageError, match="in part"):
        view_out(base[2:8], spec).is_in_place(x)
    with pytest.raises(UsageError, match="in part"):
        view_out(base[5::-1], spec).is_in_place(x)


def test_the_step_along_a_dimension_of_one_does_not_tell_memory_apart():
    base = np.zeros((2, 4))
    x, out = base[:1], base[0][np.newaxis]
    assert x.strides != out.strides
    assert view_out(out, view(x).spec).is_in_place(view(x))


def test_interleaved_arrays_do_not_overlap():
    base = np.zeros(10)
    even, odd = base[::2], base[1::2]
    assert not view_out(odd, view(even).spec).is_in_place(view(even))
    assert view_out(even, view(even).spec).is_in_place(view(even))


def test_empty_arrays_never_overlap():
    base = np.zeros(4)
    assert not view_out(base[2:2], TensorSpec(DType.FLOAT64, (0,))).is_in_place(view(base[1:1]))


def test_arrays_of_which_it_takes_long_to_tell_count_as_overlapping(monkeypatch):
    monkeypatch.setattr(base, "_OVERLAP_WORK", 0)
    memory = np.zeros(100)
    x = view(memory[::2])
    with pytest.raises(UsageError, match="in part"):
        view_out(memory[1::2], x.spec).is_in_place(x)
