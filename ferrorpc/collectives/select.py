"""Which algorithm runs a call: a pure function of (operation, group size, bytes), the same on every rank and every lane.

Up to RANK_ORDER_RANKS ranks the default folds in rank order, so changing the lane, the transport or the machine never
changes a bit of the result. Above, and where `algorithm=` asks for it, other orders are allowed (still the same on every
rank and every run): the cheaper one under the cost model is taken.

The model's constants are what this library's gRPC lane did between processes of one host. They are constants on purpose: a
measurement at start-up would let two runs of one job choose differently. What they give for all_reduce, in bytes a rank,
where two rounds of slices become cheaper than one message to everyone; and beyond 16 ranks where Rabenseifner's algorithm
becomes cheaper than recursive doubling, and the ring (never where p is a power of two) cheaper than both:

    2 ranks: 1.2 MB    4 ranks: 69 kB    8 ranks: 21 kB    16 ranks: 8.5 kB
    17 ranks: 198 kB, 2.5 MB    32 ranks: 176 kB    48 ranks: 176 kB, 9.4 MB    64 ranks: 163 kB
"""

from __future__ import annotations

import math
from typing import Final

from ferrorpc.collectives.algorithms.catalogue import CATALOGUE
from ferrorpc.collectives.algorithms.entry import Cost, Entry
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, refusal
from ferrorpc.wire.codecs import codec
from ferrorpc.wire.notice import INLINE_BYTES

RANK_ORDER_RANKS: Final = 16
"""Largest group whose default keeps rank order; direct exchange opens p-1 streams a rank, which stops paying about here."""

ALPHA_SECONDS: Final = 90e-6
"""One message from a sender's call to its receiver's wake."""
BETA_SECONDS_PER_BYTE: Final = 0.65e-9
"""The inverse of the 1.5 GB/s a stream carries."""
GAMMA_SECONDS_PER_BYTE: Final = 0.15e-9
"""The inverse of the 7 GB/s at which NumPy adds arrays that do not fit the cache."""

_REDUCTIONS: Final = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_DIRECT_NAMES: Final = ("direct", "one_shot", "two_shot")
"""Algorithms in which a rank talks to all others."""


def plan_for(call: Call, rank: int, size: int) -> Plan:
    """This rank's plan for a call of a group of `size` ranks. Where `is_announced`, the call must have the root's array.

    Raises:
        UsageError: no such algorithm for this operation, or none that works with the call's wire codec.
        TensorMismatchError: the operator means nothing for the dtype, the codec needs another dtype, or the algorithm wants
            arrays of one shape.
    """
    return select(call, size).build(call, rank, size)


def is_announced(call: Call, size: int) -> bool:
    """Whether the root's array has to be announced first, because what is done depends on its size."""
    if call.operation is not Operation.BROADCAST or size == 1:
        return False
    if call.algorithm is None:
        return size > 2  # between two ranks there is one way, whatever the size
    return any(entry.needs_size for entry in _candidates(call, size))


def select(call: Call, size: int) -> Entry:
    """The catalogue's entry for a call. Raises as `plan_for`.

    All ranks of a reduction bring as many bytes, and those of a broadcast have been told, so the cheapest is taken. Other
    moves may be uneven, so their choice must not depend on bytes: the first in the catalogue is taken.
    """
    check(call)
    candidates = _candidates(call, size)
    if call.operation not in _REDUCTIONS and not is_announced(call, size):
        return candidates[0]
    nbytes = bytes_of(call)
    return min(candidates, key=lambda entry: seconds(entry.cost(size, nbytes)))


def seconds(cost: Cost) -> float:
    """Time the model gives to a cost."""
    through_links = (cost.sent_bytes + cost.filling_bytes) * BETA_SECONDS_PER_BYTE
    return cost.rounds * ALPHA_SECONDS + through_links + cost.folded_bytes * GAMMA_SECONDS_PER_BYTE


def bytes_of(call: Call) -> int:
    """Bytes of all arrays this rank brings."""
    return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in call.inputs)


def sent_bytes(call: Call, size: int) -> int:
    """Bytes the busiest rank sends in a call, codec included. Raises as `plan_for`."""
    plain = select(call, size).cost(size, bytes_of(call)).sent_bytes
    if call.wire is None or not plain:
        return int(plain)
    count = math.prod(call.inputs[0].shape)
    return int(plain * codec(call.wire).encoded_bytes(count) / bytes_of(call))


def explain(call: Call, size: int) -> str:
    """The choice for a call, why, and what else there is: one line each."""
    chosen = select(call, size)
    nbytes = bytes_of(call)
    lines = [f"{call.signature} on {size} ranks: {chosen.name}, {chosen.order.value}"]
    if call.algorithm is not None:
        lines[0] += " (asked for)"
    for entry in sorted(CATALOGUE[call.operation], key=lambda entry: seconds(entry.cost(size, nbytes))):
        cost = entry.cost(size, nbytes)
        mark = "*" if entry is chosen else " "
        lines.append(
            f"  {mark} {entry.name:<18} {cost.rounds:3g} rounds, {cost.sent_bytes:12,.0f} bytes sent, "
            f"{cost.folded_bytes:12,.0f} folded: about {seconds(cost) * 1e6:,.0f} us, {entry.order.value}"
        )
    return "\n".join(lines)


def _candidates(call: Call, size: int) -> list[Entry]:
    entries = CATALOGUE[call.operation]
    if call.algorithm is not None:
        return _asked_for(call, entries)
    if call.wire is not None:
        return [entry for entry in entries if entry.compresses]
    if call.operation is Operation.BROADCAST and call.inputs and bytes_of(call) <= INLINE_BYTES:
        return [entry for entry in entries if entry.name == "tree"]  # as notices travel, and it with its own
    if size <= RANK_ORDER_RANKS:
        return [entry for entry in entries if entry.order.is_canonical and not entry.needs_alike]
    # Beyond, direct exchange opens too many streams; whatever else there is has fewer partners.
    fewer = [entry for entry in entries if entry.name not in _DIRECT_NAMES and not entry.needs_alike]
    return fewer or list(entries)


def _asked_for(call: Call, entries: tuple[Entry, ...]) -> list[Entry]:
    both = call.operation is Operation.ALL_REDUCE and call.algorithm == "direct"
    names = _DIRECT_NAMES if both else (call.algorithm,)
    found = [entry for entry in entries if entry.name in names]
    if not found:
        known = [entry.name for entry in entries] + ["direct"] * (call.operation is Operation.ALL_REDUCE)
        raise UsageError(
            f"{call.operation.value} has no algorithm {call.algorithm!r}",
            hint=f"leave algorithm= away, or use one of: {', '.join(known)}",
        )
    if found[0].needs_alike and len(set(call.inputs)) > 1:
        raise TensorMismatchError(
            f"algorithm={call.algorithm!r} bundles arrays of one shape, not {', '.join(map(str, call.inputs))}",
            hint="leave algorithm= away: the default takes arrays of any shape",
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


def check(call: Call) -> None:
    """Refuses calls that mean nothing, whatever runs them. Raises as `plan_for`."""
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
