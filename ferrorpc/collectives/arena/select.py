"""Which calls run in shared memory, and by which algorithm."""

from __future__ import annotations

import math

from ferrorpc.collectives.arena.all_reduce import OneShot, TwoShot
from ferrorpc.collectives.arena.board import SLOT_BYTES
from ferrorpc.collectives.arena.exchange import Barrier, Exchange
from ferrorpc.collectives.arena.prepared import Arena, ArenaPrepared
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.select import select


def prepare(arena: Arena, call: Call) -> ArenaPrepared | None:
    """The call laid out for shared memory; None where it has to travel as messages.

    Messages are for what only they can do: a wire codec, an algorithm asked for by name, operations that start in any order,
    and orders of summation that are not the left fold in rank order, which is the only one here (so that the lane never
    decides about bits).

    Raises:
        UsageError: the call means nothing on any lane.
    """
    chosen = select(call, arena.size)
    if call.wire is not None or call.algorithm is not None or call.unordered or not chosen.order.is_canonical:
        return None
    if call.operation is Operation.BARRIER:
        return Barrier(arena, call)
    if call.operation is not Operation.ALL_REDUCE:
        return Exchange(arena, call)
    nbytes = math.prod(call.inputs[0].shape) * call.inputs[0].dtype.itemsize
    return OneShot(arena, call) if nbytes <= SLOT_BYTES else TwoShot(arena, call)
