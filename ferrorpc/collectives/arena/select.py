"""Selects the calls that run in shared memory, and their algorithm."""

from __future__ import annotations

from typing import Final

from ferrorpc.collectives.arena.all_reduce import OneShot, TwoShot
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.barrier import Barrier
from ferrorpc.collectives.arena.control_blocks import SLOT_BYTES
from ferrorpc.collectives.arena.exchange import Exchange
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.call import Call, Operation, in_ranks
from ferrorpc.collectives.select import RANK_ORDER_RANKS, bytes_of, check, select

FOLD_BYTES_MAX: Final = 1 << 20
"""The most bytes a rank folds by one_shot. It reads the whole arrays of all ranks, so larger groups use two_shot sooner."""


def prepare(arena: Arena, call: Call) -> ArenaPrepared | None:
    """Prepares a call for shared memory; None where it has to travel as messages.

    Raises:
        UsageError: the call is invalid on every lane.
    """
    if not _runs_here(call, arena.size):
        return None
    if call.operation is Operation.BARRIER:
        return Barrier(arena, call)
    if call.operation is not Operation.ALL_REDUCE:
        return Exchange(arena, call)
    return OneShot(arena, call) if bytes_of(call) <= one_shot_bytes_max(arena.size) else TwoShot(arena, call)


def explain(call: Call, size: int) -> str | None:
    """How the call runs in shared memory and why, in one line; None where it travels as messages. Raises as `prepare`."""
    if not _runs_here(call, size):
        return None
    how = "flags" if call.operation is Operation.BARRIER else "every rank reads what it needs where it lies"
    if call.operation is Operation.ALL_REDUCE:
        limit = one_shot_bytes_max(size)
        how = f"{'one_shot, up to' if bytes_of(call) <= limit else 'two_shot, above'} {limit >> 10} KiB"
    return f"{call.signature} on {in_ranks(size)}: in shared memory, which all of them have; {how}"


def one_shot_bytes_max(size: int) -> int:
    """The largest array that a group of `size` ranks reduces by one_shot."""
    return min(SLOT_BYTES, FOLD_BYTES_MAX // size)


def _runs_here(call: Call, size: int) -> bool:
    """Whether a call runs in shared memory. Only messages support a wire codec, a named algorithm, operations that start in
    any order, and other orders of summation than the left fold in rank order. So the lane never changes the bits."""
    check(call)
    if call.wire is not None or call.algorithm is not None or call.unordered:
        return False
    # Up to there it is always that one, and to compare what the algorithms cost would take as long as all else of `prepare`.
    return size <= RANK_ORDER_RANKS or select(call, size).order.is_canonical
