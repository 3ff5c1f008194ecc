"""One collective call as a value: what must agree between ranks, and what concerns only this rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from functools import cached_property
from numbers import Integral
from typing import Final

from ferrorpc.errors import UsageError
from ferrorpc.types import DType, ReduceOp, TensorSpec

BUNDLING: Final = ("bruck",)
"""Algorithms whose messages bundle the arrays of several ranks, which must have one shape."""


@unique
class Operation(Enum):
    """The collectives."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


@dataclass(frozen=True)
class Call:
    """A collective as one rank called it.

    Attributes:
        inputs: specs of this rank's arrays (none for a receiver; one per rank for scatter's root, reduce_scatter
            and all_to_all).
        op: the reduction, for all_reduce, reduce and reduce_scatter.
        root: group rank, for broadcast, reduce, gather and scatter.
        wire: "bf16", "f16" or "int8": how messages of a reduction are compressed; sums stay float32.
        algorithm: a name of `algorithms.catalogue`, or None for the default.
        unordered: ranks may start such operations in any order. Not part of the signature: streams agree on it.
        note: other text that must agree, such as the ranks of a new subgroup.
    """

    operation: Operation
    inputs: tuple[TensorSpec, ...] = ()
    op: ReduceOp | None = None
    root: int | None = None
    wire: str | None = None
    algorithm: str | None = None
    note: str = ""
    unordered: bool = False

    @cached_property
    def signature(self) -> str:
        """What every rank must agree on, as text; two different texts are a CollectiveMismatchError.

        Reductions fix dtype and shape. The messages of moves describe themselves: gather, all_gather and all_to_all fix
        the dtype only (and the shape, where the algorithm bundles arrays), broadcast and scatter only the root.
        """
        facts = [self.note] if self.note else []
        if self.op is not None:
            facts.append(f"op={self.op.value}")
            facts.extend(str(spec) for spec in self.inputs)
        elif self.algorithm in BUNDLING and self.inputs:
            facts.append(str(self.inputs[0]))
        elif self.operation in (Operation.GATHER, Operation.ALL_GATHER, Operation.ALL_TO_ALL) and self.inputs:
            facts.append(self.inputs[0].dtype.label)
        if self.root is not None:
            facts.append(f"root={self.root}")
        if self.wire is not None:
            facts.append(f"wire={self.wire}")
        if self.algorithm is not None:
            facts.append(f"algorithm={self.algorithm}")
        return f"{self.operation.value}({', '.join(facts)})"


def overwritable(operation: Operation, rank: int) -> int | None:
    """Which of a rank's arrays its first result may overwrite; None if that lies elsewhere."""
    if operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST):
        return 0
    return rank if operation is Operation.REDUCE_SCATTER else None


def in_ranks(size: int) -> str:
    """A number of ranks in words, such as "1 rank"."""
    return f"{size} rank{'s' * (size != 1)}"


def example(operation: str, nbytes: int, size: int) -> Call:
    """A float32 call of `nbytes` a rank, to explain or to predict.

    Where a call takes a part for every rank, `nbytes` is their sum. The root is rank 0.

    Raises:
        UsageError: there is no such operation, or nbytes is no number of bytes.
    """
    if not isinstance(nbytes, Integral) or nbytes < 0:
        raise UsageError(f"nbytes={nbytes!r} is no number of bytes", hint="pass such as x.nbytes")
    try:
        chosen = Operation(operation)
    except ValueError:
        names = ", ".join(known.value for known in Operation)
        raise UsageError(f"there is no operation {operation!r}", hint=f"use one of: {names}") from None
    count = int(nbytes) // DType.FLOAT32.itemsize
    counts = [count]
    if chosen in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL, Operation.SCATTER):
        counts = [count * (rank + 1) // size - count * rank // size for rank in range(size)]
    elif chosen is Operation.BARRIER:
        counts = []
    specs = tuple(TensorSpec(DType.FLOAT32, (each,)) for each in counts)
    reduces = chosen in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
    rooted = chosen in (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
    return Call(chosen, specs, ReduceOp.SUM if reduces else None, 0 if rooted else None)
