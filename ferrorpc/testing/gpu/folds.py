"""The fold kernels of shared GPU memory (folds.cu) on fake GPUs, which compute the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from ferrorpc.kernels.cuda import fold_reference
from ferrorpc.testing.gpu.machine import Gpu
from ferrorpc.types import dtype_named


class Fold:
    """One of FOLDS on one GPU. Its arguments are addresses and numbers, as in the CUDA source."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        _, self._operator, self._element = name.split("_")
        self._storage: np.dtype[Any] = dtype_named(self._element).storage

    def __call__(self, bases: int, size: int, offset: int, count: int, target: int, divisor: float) -> None:
        size_bytes = count * self._storage.itemsize
        starts = self._gpu.bytes_at(bases, size * 8).view(np.uint64).tolist()
        arrays = [self._gpu.bytes_at(start + offset, size_bytes).view(self._storage) for start in starts]
        found = fold_reference.folded(arrays, self._operator, self._element, divisor)
        self._gpu.bytes_at(target, size_bytes).view(self._storage)[:] = found
