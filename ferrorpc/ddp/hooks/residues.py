"""What hooks keep of one step for the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.ddp.hooks.vector_ops import HOST, VectorOps
from ferrorpc.errors import UsageError


class Residues:
    """float32 vectors by key, each on the device of the values that it is added to; those from a state on the host until then.

    Attributes:
        kept: key -> operations on its device, vector, and the weight that it is multiplied by.
    """

    def __init__(self) -> None:
        self.kept: dict[str, tuple[VectorOps, Any, float]] = {}

    def of(self, key: str, count: int, ops: VectorOps, weight: float = 1.0) -> Any:
        """The vector of this key, to be changed in place: times `weight`, on the device of `ops`; zeros at first.

        Raises:
            UsageError: it has another number of values.
        """
        if key not in self.kept:
            self.kept[key] = ops, ops.zeros(count), weight
        before, residue, of_before = self.kept[key]
        if residue.size != count:
            message = f"the residue of {key} has {residue.size} values for {count}"
            raise UsageError(message, hint="is it another hook's?")
        if type(before) is not type(ops):
            residue = ops.from_host(before.to_host(residue))
        if weight != of_before:
            ops.scale(residue, 1 / of_before)  # and not by the quotient, which may be beyond float32
            ops.scale(residue, weight)
        self.kept[key] = ops, residue, weight
        return residue

    def forget(self, prefix: str) -> None:
        """Drops those whose keys begin so."""
        self.kept = {key: each for key, each in self.kept.items() if not key.startswith(prefix)}

    def state(self) -> dict[str, Array]:
        """A copy of each on the host, of weight 1."""
        found = {}
        for key, (ops, residue, weight) in self.kept.items():
            found[key] = ops.to_host(residue)
            if weight != 1:
                HOST.scale(found[key], 1 / weight)
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes these in place of all others."""
        self.kept = {key: (HOST, np.array(each, np.float32), 1.0) for key, each in state.items()}
