"""The types of the operations for type checkers: an array comes back as its own type, at once or, with `async_op`, as a Work.

An `Array` comes back in its own type: NumPy's with its dtype, torch's, CuPy's. A NumPy scalar, or anything else that is
`Readable`, comes back as a NumPy array.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

from ferrorpc.types import ReduceOp


class Array(Protocol):
    """What NumPy, CuPy and torch arrays have in common. JAX arrays, which cannot be written, are not included."""

    @property
    def shape(self) -> Any:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> Any:
        """Type of the elements."""

    def __setitem__(self, key: Any, value: Any, /) -> None:
        """Writes elements."""

    def __dlpack_device__(self) -> Any:
        """The device it is on. A table of pandas or xarray, which is no array here, does not say."""


class ReadThroughDLPack(Protocol):
    """An array of any library that supports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """The array as a capsule."""

    def __dlpack_device__(self) -> Any:
        """The device it is on."""


class Timed(TypedDict, total=False):
    """Options of every operation."""

    timeout: float | None


class Moving(Timed, total=False):
    """Options of operations with several algorithms."""

    algorithm: str | None


class Reducing(Moving, total=False):
    """Options of reductions."""

    wire: str | None


A = TypeVar("A", bound=Array)
Scalar = TypeVar("Scalar", bound=np.generic)
Readable: TypeAlias = bool | int | float | complex | np.generic | ReadThroughDLPack
Parts: TypeAlias = list[A] | tuple[A, ...] | A
Op: TypeAlias = ReduceOp | str
Now: TypeAlias = Literal[False]
Later: TypeAlias = Literal[True]
