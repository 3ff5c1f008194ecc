"""Which algorithm runs a call: a pure function of (operation, group size, bytes), the same on every rank and every lane.

Up to RANK_ORDER_RANKS ranks the default folds in rank order, so changing the lane, the transport or the machine never
changes a bit of the result. Above, and where `algorithm=` asks for it, other orders are allowed (still the same on every
rank and every run): the cheaper one under the cost model is taken.

The model's constants are what this library's gRPC lane did between processes of one host. They are constants on purpose: a
measurement at start-up would let two runs of one job choose differently. What they give for all_reduce, in bytes a rank,
where two rounds of slices become cheaper than one message to everyone, and the ring cheaper than recursive doubling:

    2 ranks: 1.2 MB    4 ranks: 69 kB    8 ranks: 21 kB    16 ranks: 8.5 kB        17 ranks: 0.9 MB    64 ranks: 3.2 MB
"""

from __future__ import annotations

import math
from typing import Final

from ferrorpc.collectives.algorithms.catalogue import CATALOGUE, Cost, Entry
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, refusal

RANK_ORDER_RANKS: Final = 16
"""Largest group whose default keeps rank order; direct exchange opens p-1 streams a rank, which stops paying about here."""

ALPHA_SECONDS: Final = 90e-6
"""One message from a sender's call to its receiver's wake."""
BETA_SECONDS_PER_BYTE: Final = 0.65e-9
"""The inverse of the 1.5 GB/s a stream carries."""
GAMMA_SECONDS_PER_BYTE: Final = 0.15e-9
"""The inverse of the 7 GB/s at which NumPy adds arrays that do not fit the cache."""

_REDUCTIONS: Final = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_DIRECT_NAMES: Final = ("one_shot", "two_shot")
"""What algorithm="direct" may stand for in an all_reduce."""


def plan_for(call: Call, rank: int, size: int) -> Plan:
    """This rank's plan for a call of a group of `size` ranks.

    Raises:
        UsageError: no such algorithm for this operation, or none that works with the call's wire codec.
        TensorMismatchError: the operator means nothing for the dtype, or the codec needs another dtype.
    """
    return select(call, size).build(call, rank, size)


def select(call: Call, size: int) -> Entry:
    """The catalogue's entry for a call. Raises as `plan_for`.

    All ranks of a reduction bring as many bytes, so the cheapest is taken. Moves may be uneven (and off the root of a
    broadcast nothing is known), so their choice must not depend on bytes: the first in the catalogue is taken.
    """
    _check(call)
    candidates = _candidates(call, size)
    if call.operation not in _REDUCTIONS:
        return candidates[0]
    nbytes = bytes_of(call)
    return min(candidates, key=lambda entry: seconds(entry.cost(size, nbytes)))


def seconds(cost: Cost) -> float:
    """Time the model gives to a cost."""
    return cost.rounds * ALPHA_SECONDS + cost.sent_bytes * BETA_SECONDS_PER_BYTE + cost.folded_bytes * GAMMA_SECONDS_PER_BYTE


def bytes_of(call: Call) -> int:
    """Bytes of all arrays this rank brings."""
    return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in call.inputs)


def explain(call: Call, size: int) -> str:
    """The choice for a call, why, and what else there is: one line each."""
    chosen = select(call, size)
    nbytes = bytes_of(call)
    lines = [f"{call.signature} on {size} ranks: {chosen.name}, {_order(call, chosen)}"]
    if call.algorithm is not None:
        lines[0] += " (asked for)"
    for entry in sorted(CATALOGUE[call.operation], key=lambda entry: seconds(entry.cost(size, nbytes))):
        cost = entry.cost(size, nbytes)
        mark = "*" if entry is chosen else " "
        lines.append(
            f"  {mark} {entry.name:<18} {cost.rounds:3g} rounds, {cost.sent_bytes:12,.0f} bytes sent, "
            f"{cost.folded_bytes:12,.0f} folded: about {seconds(cost) * 1e6:,.0f} us, {_order(call, entry)}"
        )
    return "\n".join(lines)


def _order(call: Call, entry: Entry) -> str:
    if call.operation not in _REDUCTIONS:
        return "moves only"
    return "in rank order" if entry.rank_order else "in an order of its own"


def _candidates(call: Call, size: int) -> list[Entry]:
    entries = CATALOGUE[call.operation]
    if call.algorithm is not None:
        return _asked_for(call, entries)
    if call.wire is not None:
        return [entry for entry in entries if entry.compresses]
    if size <= RANK_ORDER_RANKS:
        return [entry for entry in entries if entry.rank_order]
    if call.operation is Operation.ALL_REDUCE:
        return [entry for entry in entries if entry.name not in _DIRECT_NAMES]
    # Beyond, direct exchange opens too many streams; whatever else there is has fewer partners.
    return [entry for entry in entries if entry.name != "direct"] or list(entries)


def _asked_for(call: Call, entries: tuple[Entry, ...]) -> list[Entry]:
    names = _DIRECT_NAMES if call.operation is Operation.ALL_REDUCE and call.algorithm == "direct" else (call.algorithm,)
    found = [entry for entry in entries if entry.name in names]
    if not found:
        known = [entry.name for entry in entries] + ["direct"] * (call.operation is Operation.ALL_REDUCE)
        raise UsageError(
            f"{call.operation.value} has no algorithm {call.algorithm!r}",
            hint=f"leave algorithm= away, or use one of: {', '.join(known)}",
        )
    if call.wire is None:
        return found
    sound = [entry for entry in found if entry.compresses]
    if not sound:
        able = ", ".join(entry.name for entry in entries if entry.compresses)
        raise UsageError(
            f"algorithm={call.algorithm!r} cannot compress: it would round partial sums at every hop",
            hint=f"with wire={call.wire!r} leave algorithm= away, or use: {able}",
        )
    return sound


def _check(call: Call) -> None:
    if call.op is not None and call.inputs:
        why_not = refusal(call.op, call.inputs[0].dtype)
        if why_not is not None:
            raise TensorMismatchError(why_not)
    if call.wire is None:
        return
    if call.operation not in _REDUCTIONS:
        raise UsageError(
            f"{call.operation.value} takes no wire codec", hint="wire= is for all_reduce, reduce and reduce_scatter"
        )
    if call.inputs[0].dtype is not DType.FLOAT32:
        raise TensorMismatchError(
            f"wire={call.wire!r} compresses float32 messages, not {call.inputs[0].dtype.label}",
            hint="leave wire= away, or convert the array to float32",
        )
