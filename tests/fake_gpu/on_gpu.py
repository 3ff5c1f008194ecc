"""A group whose callers hold host arrays while the group gets arrays on a GPU: so suites for host arrays try GPU arrays too.

The GPU is a fake one, or a real one through CuPy. Arrays keep their layout and what memory they share with each other within
one call. What a GPU's library cannot hold stays on the host: read-only outputs, foreign byte order, objects, numbers.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import pytest

from ferrorpc.arrays.kinds import NUMPY, spec_of
from ferrorpc.arrays.torch_kind import _host_array
from ferrorpc.group import ProcessGroup
from ferrorpc.operations.stream import Stream
from ferrorpc.work import Work


class Library(Protocol):
    """Whose arrays the group gets."""

    def copied(self, flat: np.ndarray[Any, Any]) -> Any:
        """A copy of a flat array, as something that `placed` takes; on the current GPU."""

    def placed(self, block: Any, offset: int, like: np.ndarray[Any, Any]) -> Any:
        """An array as `like`, over a copy's memory from a byte on. None where the library has no such arrays."""

    def holds(self, x: Any) -> bool:
        """Whether x is an array of this library's."""

    def home(self, x: Any) -> np.ndarray[Any, Any]:
        """A copy on the host."""


class Cupy:
    """CuPy's, or its stand-in's."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.copied, self.home = cupy.asarray, cupy.asnumpy

    def placed(self, block: Any, offset: int, like: np.ndarray[Any, Any]) -> Any:
        """As `Library.placed`."""
        return self._cupy.ndarray(like.shape, like.dtype, block.data + offset, like.strides)

    def holds(self, x: Any) -> bool:
        """As `Library.holds`."""
        return isinstance(x, self._cupy.ndarray)


class Tensors:
    """torch's.

    Args:
        device: as torch names it.
    """

    def __init__(self, device: str) -> None:
        self._torch = pytest.importorskip("torch")
        self._device = device

    def copied(self, flat: np.ndarray[Any, Any]) -> Any:
        """As `Library.copied`."""
        return self._torch.from_numpy(flat.view(np.uint8).copy()).to(self._device)

    def placed(self, block: Any, offset: int, like: np.ndarray[Any, Any]) -> Any:
        """As `Library.placed`: torch has no negative strides."""
        dtype, strides = getattr(self._torch, like.dtype.name), [step // like.itemsize for step in like.strides]
        if not like.size:
            return self._torch.empty(like.shape, dtype=dtype, device=self._device)
        if min(strides, default=0) < 0:
            return None
        count = 1 + sum((size - 1) * step for size, step in zip(like.shape, strides, strict=True))
        return block[offset : offset + count * like.itemsize].view(dtype).as_strided(like.shape, strides)

    def holds(self, x: Any) -> bool:
        """As `Library.holds`."""
        return isinstance(x, self._torch.Tensor)

    def home(self, x: Any) -> np.ndarray[Any, Any]:
        """As `Library.home`."""
        x = x.detach()
        return NUMPY.typed(_host_array(x.cpu()), spec_of(x))


class OnGpu:
    """Stands for a ProcessGroup, a Stream or a Work."""

    def __init__(self, inner: Any, library: Library, outs: dict[int, tuple[Any, Any]] | None = None) -> None:
        self._inner = inner
        self._library = library
        self._outs = outs or {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(self._inner, Work):
                if name == "wait":
                    kwargs.setdefault("host", True)
                return self._home(found(*args, **kwargs), self._outs)
            there = _There(self._library)
            outs: dict[int, tuple[Any, Any]] = {}
            given = {key: there.out(value, outs) if key == "out" else there.take(value) for key, value in kwargs.items()}
            return self._home(found(*[there.take(each) for each in args], **given), outs)

        return call

    def __repr__(self) -> str:
        return repr(self._inner)

    def _home(self, result: Any, outs: dict[int, tuple[Any, Any]]) -> Any:
        """The result as the caller knows it; what was written on the GPU is in the caller's `out` then."""
        if isinstance(result, ProcessGroup | Stream | Work):
            return OnGpu(result, self._library, outs)
        for host, near in outs.values():
            for one, other in zip(host, near, strict=True) if isinstance(host, list) else ((host, near),):
                if self._library.holds(other):
                    one[...] = self._library.home(other)
        if id(result) in outs:
            return outs[id(result)][0]
        if isinstance(result, list):
            return [self._home(each, {}) for each in result]
        return self._library.home(result) if self._library.holds(result) else result


class _There:
    """Host arrays of one call on the GPU."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._roots: dict[int, Any] = {}
        self._taken: dict[int, tuple[Any, Any]] = {}
        """By the host array's id: itself, and the one GPU array for it."""

    def take(self, value: Any) -> Any:
        """Arrays as GPU arrays; anything else as it is."""
        if isinstance(value, list):
            return [self.take(each) for each in value]
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if type(value) is not np.ndarray or not value.dtype.isnative or value.dtype.kind == "O":
            return value
        if id(value) not in self._taken:
            self._taken[id(value)] = value, self._near(value)
        return self._taken[id(value)][1]

    def _near(self, value: Any) -> Any:
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        block = self._roots.get(id(root))
        if block is None:
            flat = np.lib.stride_tricks.as_strided(root, (root.size,), (root.itemsize,)) if root.size else root.reshape(-1)
            block = self._roots[id(root)] = self._library.copied(flat)
        found = self._library.placed(block, value.ctypes.data - root.ctypes.data if value.size else 0, value)
        return value if found is None else found

    def out(self, value: Any, outs: dict[int, tuple[Any, Any]]) -> Any:
        """As `take`, and remembered; read-only ones stay on the host."""
        if isinstance(value, np.ndarray) and not value.flags.writeable and value.flags.c_contiguous:
            return value
        near = self.take(value)
        if near is not value and near is not None:
            outs[id(near)] = (value, near)
        return near
