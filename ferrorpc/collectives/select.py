"""Which algorithm runs a call: a pure function of what every rank knows, the same on every rank.

The order of summation is chosen first. It depends on (operation, group size, bytes) alone: up to RANK_ORDER_RANKS ranks it is
the left fold in rank order; above, that of the cheapest algorithm under REFERENCE, which never changes. So neither the lane nor
a measurement changes a bit of any result. Then the cheapest algorithm of that order is chosen under the current cost table
(wire/cost_table.py), which is the same on every rank because the coordinator publishes it.

For all_reduce beyond 16 ranks, REFERENCE changes from folding in pairs to folding round the ring at these bytes a rank (never
where the number of ranks is a power of two):

    17 ranks: 2.5 MB    48 ranks: 9.4 MB

Under the packaged table, two_shot becomes cheaper than one_shot, and beyond 16 ranks Rabenseifner's algorithm cheaper than
recursive doubling, at:

    2 ranks: 13 MB     4 ranks: 670 kB    8 ranks: 430 kB    16 ranks: 360 kB
    17 ranks: 740 kB   32 ranks: 650 kB   64 ranks: 600 kB
"""

from __future__ import annotations

import math
from typing import Final

from ferrorpc.collectives.algorithms.algorithm import Algorithm, Cost, Order
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call, Operation, in_ranks
from ferrorpc.collectives.tuning import Tuning, algorithm_names
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, refusal
from ferrorpc.wire.announcement import INLINE_BYTES
from ferrorpc.wire.codecs import codec
from ferrorpc.wire.cost_table import Costs

RANK_ORDER_RANKS: Final = 16
"""Largest group whose default keeps rank order. Direct exchange opens p-1 streams a rank, too many beyond about this."""

REFERENCE: Final = Costs(
    alpha_seconds=90e-6, message_seconds=0.0, beta_seconds_per_byte=0.65e-9, gamma_seconds_per_byte=0.15e-9
)
"""Costs of the gRPC lane between processes of one host, as once measured. They decide the order of summation, so another value
changes results of groups beyond RANK_ORDER_RANKS: an incompatible change."""

DEFAULT_TUNING: Final = Tuning()
"""The packaged cost table, no algorithm requested, hosts unknown."""

_REDUCTIONS: Final = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_DIRECT_ALL_REDUCE: Final = ("one_shot", "two_shot")
"""What algorithm="direct" stands for."""


def plan_for(call: Call, rank: int, size: int, tuning: Tuning = DEFAULT_TUNING) -> Plan:
    """This rank's plan for a call of a group of `size` ranks. Where `is_announced`, the call must have the root's array.

    Raises:
        UsageError: no such algorithm for this operation, or none that works with the call's wire codec.
        TensorMismatchError: the operator is not defined for the dtype, the codec needs another dtype, or the algorithm needs
            arrays of one shape.
    """
    return select(call, size, tuning).build(call, rank, size)


def is_announced(call: Call, size: int, tuning: Tuning = DEFAULT_TUNING) -> bool:
    """Whether the root's array has to be announced first, because the algorithm depends on its size."""
    if call.operation is not Operation.BROADCAST or size == 1:
        return False
    if call.algorithm is None:
        return size > 2  # between two ranks there is one way, whatever the size
    return any(entry.needs_size for entry in _candidates(call, size, tuning))


def select(call: Call, size: int, tuning: Tuning = DEFAULT_TUNING) -> Algorithm:
    """The catalogue's entry for a call. Raises as `plan_for`.

    All ranks of a reduction have equally many bytes, and those of a broadcast know the size, so the cheapest is taken.
    Other moves may be uneven, so their choice must not depend on bytes: the first in the catalogue is taken.
    """
    check(call)
    candidates = _candidates(call, size, tuning)
    if call.operation not in _REDUCTIONS and not is_announced(call, size, tuning):
        return candidates[0]
    nbytes = bytes_of(call)
    order = min(candidates, key=lambda entry: seconds(entry.cost(size, nbytes), size, REFERENCE)).order
    costs = tuning.costs(size)
    equal = [entry for entry in candidates if entry.order is order]
    return min(equal, key=lambda entry: seconds(entry.cost(size, nbytes), size, costs))


def seconds(cost: Cost, size: int, costs: Costs) -> float:
    """The predicted time of a collective of `size` ranks, in closed form. (`predict` simulates it chunk by chunk.)

    It is the time of the busiest rank or, if longer, the time in which shared processors can do the work of all ranks.
    """
    messages = max(cost.rounds, cost.messages)
    folding = cost.folded_bytes * costs.gamma_seconds_per_byte
    through_links = (cost.sent_bytes + cost.filling_bytes) * costs.beta_seconds_per_byte
    busy = messages * costs.message_seconds + through_links + folding
    if costs.processors is not None:
        all_messages, all_bytes = cost.all_messages or size * messages, cost.all_bytes or size * cost.sent_bytes
        both_ends = 2 * (all_messages * costs.message_seconds + all_bytes * costs.beta_seconds_per_byte)
        all_folding = folding * all_bytes / cost.sent_bytes if cost.sent_bytes else 0.0
        busy = max(busy, (both_ends + all_folding) / costs.processors)
    return cost.rounds * costs.alpha_seconds + busy


def bytes_of(call: Call) -> int:
    """Bytes of all input arrays of this rank."""
    return sum(spec.nbytes for spec in call.inputs)


def sent_bytes(call: Call, size: int) -> int:
    """Bytes the busiest rank sends in a call by the packaged table, codec included. Raises as `plan_for`."""
    plain = select(call, size).cost(size, bytes_of(call)).sent_bytes
    if call.wire is None or not plain:
        return int(plain)
    encoded = sum(codec(call.wire).encoded_bytes(math.prod(spec.shape)) for spec in call.inputs)
    return int(plain * encoded / bytes_of(call))


def explain(call: Call, size: int, tuning: Tuning = DEFAULT_TUNING) -> str:
    """The algorithm chosen for a call as messages, the reason, and the alternatives: one line each."""
    applied = tuning.applied(call)
    chosen = select(applied, size, tuning)
    nbytes = bytes_of(call)
    costs = tuning.costs(size)
    lines = [
        f"{call.signature} on {in_ranks(size)}: {chosen.name}, {chosen.order.value}{_why(call, applied)}",
        f"  by the cost table {tuning.table.name!r}: {costs}",
    ]
    for entry in sorted(tuning.algorithms_of(call.operation), key=lambda entry: seconds(entry.cost(size, nbytes), size, costs)):
        cost = entry.cost(size, nbytes)
        mark = "*" if entry.name == chosen.name else " "
        rounds = f"{cost.rounds:3g} round" + (", " if cost.rounds == 1 else "s,")
        lines.append(
            f"  {mark} {entry.name:<18} {rounds} {cost.sent_bytes:12,.0f} bytes sent, "
            f"{cost.folded_bytes:12,.0f} folded: about {seconds(cost, size, costs) * 1e6:,.0f} us, {entry.order.value}"
        )
    return "\n".join([*lines, "  * the algorithm that is chosen"])


def _why(call: Call, applied: Call) -> str:
    if call.algorithm is not None:
        return " (asked for)"
    if applied.algorithm is not None:
        return " (asked for by the setting algorithm)"
    if call.operation not in (*_REDUCTIONS, Operation.BROADCAST, Operation.BARRIER):
        return " (arrays may differ from rank to rank, so their sizes decide nothing)"
    return ""


def _candidates(call: Call, size: int, tuning: Tuning) -> list[Algorithm]:
    entries = tuning.algorithms_of(call.operation)
    if call.algorithm is not None:
        return _asked_for(call, entries)
    if call.wire is not None:
        return [entry for entry in entries if entry.compresses]
    if call.operation is Operation.BROADCAST and call.inputs and bytes_of(call) <= INLINE_BYTES:
        return [entry for entry in entries if entry.name == "tree"]  # it travels in its announcement, down this tree
    if size <= RANK_ORDER_RANKS:
        return [entry for entry in entries if entry.order.is_canonical and not entry.needs_alike]
    # Beyond that, direct exchange opens too many streams, and all other algorithms have fewer partners. Which ranks share
    # a host must not decide the order of summation.
    fewer = [
        entry for entry in entries if not (entry.reaches_all_at_once(size) or entry.needs_alike or entry.order is Order.HOSTS)
    ]
    return fewer or list(entries)


def _asked_for(call: Call, entries: tuple[Algorithm, ...]) -> list[Algorithm]:
    either = ["direct"] * (call.operation is Operation.ALL_REDUCE)
    names = _DIRECT_ALL_REDUCE if call.algorithm in either else (call.algorithm,)
    found = [entry for entry in entries if entry.name in names]
    if not found:
        if call.algorithm in algorithm_names(call.operation):
            raise UsageError(
                f"{call.operation.value} by algorithm={call.algorithm!r} needs ranks that share memory on several hosts",
                hint="leave algorithm= away; transport='auto' finds out which ranks share a host",
            )
        known = [entry.name for entry in entries] + either
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
        able = ", ".join([entry.name for entry in entries if entry.compresses] + either)
        raise UsageError(
            f"algorithm={call.algorithm!r} cannot compress: it would round partial sums at every hop",
            hint=f"with wire={call.wire!r} leave algorithm= away, or use: {able}",
        )
    return sound


def check(call: Call) -> None:
    """Refuses calls that are invalid whatever runs them. Raises as `plan_for`."""
    if call.op is not None and call.inputs:
        why_not = refusal(call.op, call.inputs[0].dtype)
        if why_not is not None:
            raise TensorMismatchError(why_not.reason, hint=why_not.hint)
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
