"""The common part of runners whose arrays are torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ferrorpc.cli.bench.case import ORDINARY
from ferrorpc.cli.bench.runners.base import Runner


class TensorRunner(Runner):
    """A rank whose arrays are torch tensors on the CPU."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch: Any = torch

    def array(self, count: int, dtype: str, memory: str) -> Any:
        if memory != ORDINARY:
            raise self.unable(f"{memory} memory")
        return self._torch.empty(count, dtype=getattr(self._torch, dtype))

    def write(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        array.copy_(self._torch.from_numpy(values))

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = array.to(self._torch.float32, copy=True).numpy()
        return found
