"""Dtypes, reduction operators, which of them fit together, and the members of a generation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum, unique
from functools import lru_cache
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.errors import TensorMismatchError, UsageError


def integer_of(value: Any) -> int:
    """A caller's integer, of whatever library. -1, which is no rank, tag or count, if it is none; booleans are none."""
    try:
        return -1 if isinstance(value, bool) else index(value)
    except TypeError:
        return -1


def number_of(value: Any) -> float:
    """A caller's number, of whatever library. NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


@unique
class DType(IntEnum):
    """Element types on the wire; the numbers are those of `protos/ferrorpc/v1/tensor.proto`."""

    BOOL = 1
    INT8 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    UINT16 = 7
    UINT32 = 8
    UINT64 = 9
    FLOAT16 = 10
    BFLOAT16 = 11
    FLOAT32 = 12
    FLOAT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15

    @property
    def label(self) -> str:
        """Lower-case name, as NumPy spells it."""
        return self.name.lower()

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype that holds its bytes: its own, or uint16 for bfloat16, which NumPy lacks."""
        return _STORAGE[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(_STORAGE[self].itemsize)

    @property
    def is_half(self) -> bool:
        """float16 or bfloat16, whose sums are computed in float32 and rounded once."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def is_float(self) -> bool:
        """Real floating point, half types included."""
        return DType.FLOAT16 <= self <= DType.FLOAT64

    @property
    def is_complex(self) -> bool:
        """Complex floating point."""
        return self >= DType.COMPLEX64

    @property
    def is_integer(self) -> bool:  # type: ignore[override, unused-ignore]  # from Python 3.12 on int has such a method
        """Signed or unsigned integers, bool not included."""
        return DType.INT8 <= self <= DType.UINT64


_STORAGE: Final = {dtype: np.dtype("uint16" if dtype is DType.BFLOAT16 else dtype.label) for dtype in DType}
_BY_NAME: Final = {dtype.label: dtype for dtype in DType}


def dtype_of(value: np.dtype[Any]) -> DType:
    """The wire dtype of a NumPy dtype (ml_dtypes' bfloat16 included).

    Raises:
        TensorMismatchError: for any other dtype, and for foreign byte order; the message lists what is supported.
    """
    found = _BY_NAME.get(value.name)
    if found is None or not value.isnative:
        known = ", ".join(_BY_NAME)
        raise TensorMismatchError(
            f"dtype {value.str if found else value} is not supported", hint=f"use native byte order and one of: {known}"
        )
    return found


def dtype_named(name: str) -> DType:
    """The wire dtype with this lower-case name."""
    if name not in _BY_NAME:
        raise TensorMismatchError(f"dtype {name} is not supported", hint=f"use one of: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def as_dtype(value: Any) -> DType:
    """The wire dtype of whatever names one: a DType, a name, a dtype of torch, or of NumPy ("f4", float, np.float32).

    Raises:
        TensorMismatchError: for anything else; the message lists what is supported.
    """
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    try:
        known = None if value is None else np.dtype(value)  # None would be float64
    except (TypeError, ValueError):
        known = None
    return dtype_named(name) if known is None else dtype_of(known)


@unique
class ReduceOp(Enum):
    """How values of several ranks become one."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @classmethod
    def named(cls, op: ReduceOp | str) -> ReduceOp:
        """The operator, given as a ReduceOp or by its lower-case name.

        Raises:
            UsageError: for anything else.
        """
        if isinstance(op, ReduceOp):
            return op
        try:
            return cls(op)
        except ValueError:
            raise UsageError(f"op={op!r} is no reduction", hint=f"use one of: {', '.join(o.value for o in cls)}") from None


_BITS: Final = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


class Refusal(NamedTuple):
    """Why an operator cannot be applied to a dtype, and what to do instead."""

    reason: str
    hint: str


def refusal(op: ReduceOp, dtype: DType) -> Refusal | None:
    """Why this operator cannot be applied to this dtype; None if it can."""
    if op is ReduceOp.MEAN and not (dtype.is_float or dtype.is_complex):
        return Refusal(f"the mean of {dtype.label} values is no {dtype.label}", "convert to a float first, or use op='sum'")
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        reason = f"{dtype.label} values have no order, so op={op.value!r} means nothing for them"
        return Refusal(reason, "reduce what you compare by, such as np.abs(x)")
    if op in _BITS and not (dtype.is_integer or dtype is DType.BOOL):
        return Refusal(f"op={op.value!r} works on bits, not on {dtype.label}", "convert to integers or bool first")
    return None


class TensorSpec(NamedTuple):
    """Dtype, which is a `DType`, and shape of an array."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array's elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return _spelled(self.dtype, self.shape)


def fits(array: Any, spec: TensorSpec) -> bool:
    """Whether an array in storage dtype, on the host or on a device, has this dtype and shape."""
    return bool(array.shape == spec.shape and array.dtype == spec.dtype.storage)


@lru_cache(1024)
def _spelled(dtype: DType, shape: tuple[int, ...]) -> str:
    """Cached, because every operation formats its signature."""
    return f"{dtype.label}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class Peer:
    """One member of a generation, as the other members know it."""

    rank: int
    name: str
    host: str = ""
    address: str = ""
    """host:port of its worker server; empty in a world in one process."""
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The result of a rendezvous for this process. All later messages carry (cluster_id, generation)."""

    job: str
    cluster_id: str
    generation: int
    rank: int
    peers: tuple[Peer, ...]
    reason: str = ""
    cost_table: str = ""
    """The cost table of this generation as JSON (wire.cost_table); empty for the one that comes with the package."""

    @property
    def size(self) -> int:
        """World size of this generation."""
        return len(self.peers)
