"""Proves plans correct without running them: all ranks together, on symbols instead of numbers.

Ranks are advanced in turn, each through its actions in order, until none can continue. That finds deadlocks and messages that
are never sent or never received. The terms in OUT show whether each result holds every rank's part exactly once, in which
order, and whether all ranks agree. All of it is done a second time with OUT in the memory of IN, as for
`all_reduce(x, out=x)`.

Credit is part of it: a message of more than EAGER_BYTES is not complete, and its sender does not continue, before its receiver
has entered the operation. Ranks enter as late as possible: the next one only when no other can continue. A rank that can
continue can also do so later (no event removes a message or an entry), so every other order of events has the same end, and one
order proves them all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ferrorpc.collectives.algorithms.plan import (
    Action,
    Buffer,
    Copy,
    Finish,
    Fold,
    FoldOwn,
    FoldUnder,
    Load,
    Plan,
    Quantise,
    Receive,
    Region,
    Send,
)
from ferrorpc.collectives.algorithms.symbolic import Run, SymbolicArray, Term, aligned, fold, length
from ferrorpc.collectives.call import Call, Operation, overwritable
from ferrorpc.errors import UsageError
from ferrorpc.transports.credit import EAGER_BYTES


class _Unsound(Exception):
    """An action that is impossible; becomes a finding."""


@dataclass
class _Rank:
    """The state of one rank in its plan."""

    plan: Plan
    strips: dict[tuple[Buffer, int], SymbolicArray]
    compresses: bool
    heard: set[int]
    eager_items: int
    has_entered: bool = False
    position: int = 0
    inbox: dict[tuple[int, int], tuple[list[Run], set[int]]] = field(default_factory=dict)

    def read(self, region: Region) -> list[Run]:
        if region.is_empty:
            return []
        strip = self.strips.get((region.buffer, region.item))
        if strip is None:
            raise _Unsound(f"{region} is used before it exists")
        stop = len(strip) if region.stop is None else region.stop
        if stop > len(strip):
            raise _Unsound(f"{region} ends behind its array")
        piece = strip.cut(region.start, stop)
        if any(run[2] is None for run in piece):
            raise _Unsound(f"{region} is read before it is written")
        return piece

    def write(self, region: Region, piece: Sequence[Run]) -> None:
        if region.buffer is Buffer.IN:
            raise _Unsound(f"{region} is written, which belongs to the caller")
        if region.buffer is Buffer.WORK and (Buffer.WORK, region.item) not in self.strips:
            raise _Unsound(f"{region} has no room")
        strip = self.strips.setdefault((region.buffer, region.item), SymbolicArray())
        if region.stop is None:
            strip.become(piece)
            return
        if region.stop - region.start != length(piece):
            raise _Unsound(f"{region} gets {length(piece)} elements")
        if region.buffer is Buffer.WORK and region.stop > len(strip):
            raise _Unsound(f"{region} ends behind its array")
        strip.paste(region.start, piece)

    def local(self, action: Action) -> None:
        """Does an action that needs no message."""
        if isinstance(action, Load | Copy):
            self.write(action.region, self.read(action.source))
        elif isinstance(action, Finish):
            piece = self.read(action.source)
            self.write(action.region, [(count, first, term and replace(term, finished=True)) for count, first, term in piece])
        elif isinstance(action, FoldOwn):
            self.write(action.region, _folded(self.read(action.region), self.read(action.source)))
        elif isinstance(action, Quantise):
            self.write(action.region, _rounded(self.read(action.region)))

    def take(self, action: Receive | Fold | FoldUnder) -> bool:
        """Does an action that needs a message. Returns False if that has not arrived."""
        message = self.inbox.pop((action.peer, action.slot), None)
        if message is None:
            return False
        piece, heard = message
        self.heard |= heard
        if isinstance(action, Receive):
            self.write(action.region, piece)
        elif isinstance(action, Fold):
            self.write(action.region, _folded(self.read(action.region), piece))
        else:
            self.write(action.region, _folded(piece, self.read(action.region)))
        return True


def findings(calls: Sequence[Call], plans: Sequence[Plan], *, rank_order: bool = False) -> list[str]:
    """What is wrong with the plans of one operation; empty when they are sound.

    Args:
        calls: each rank's call, in rank order (they differ where parts are uneven, or where a root brings what others do not).
        plans: each rank's plan.
        rank_order: whether the algorithm promises the canonical left fold in rank order.
    """
    found = _run(calls, plans, rank_order, in_place=False)
    if found or overwritable(calls[0].operation, 0) is None:
        return found
    return [f"in place: {text}" for text in _run(calls, plans, rank_order, in_place=True)]


def formulas(calls: Sequence[Call], plans: Sequence[Plan]) -> list[list[list[tuple[int, str]]]]:
    """The formulas of each rank's results: runs of (elements, text), such as (4, "((x0+x1)+x2)").

    Raises:
        UsageError: the plans are invalid.
    """
    ranks = _ranks(calls, plans, in_place=False)
    try:
        _advance_all(ranks)
    except _Unsound as problem:
        raise UsageError(str(problem), hint="see what `findings` says of these plans") from None
    strips = [[rank.strips.get((Buffer.OUT, item), SymbolicArray()) for item in range(rank.plan.out_items)] for rank in ranks]
    return [
        [[(count, term.text if term else "") for count, _, term in strip.cut(0, len(strip))] for strip in results]
        for results in strips
    ]


def _run(calls: Sequence[Call], plans: Sequence[Plan], rank_order: bool, in_place: bool) -> list[str]:
    ranks = _ranks(calls, plans, in_place)
    try:
        _advance_all(ranks)
    except _Unsound as problem:
        return [str(problem)]
    found = list(_unfinished(ranks))
    if found:
        return found
    if calls[0].operation is Operation.BARRIER:
        return list(_unheard(ranks))
    found = [text for number, rank in enumerate(ranks) for text in _wrong_results(calls, number, rank, rank_order)]
    if calls[0].operation is Operation.ALL_REDUCE and not found:
        found = list(_disagreements(ranks))
    return found


def _ranks(calls: Sequence[Call], plans: Sequence[Plan], in_place: bool) -> list[_Rank]:
    itemsize = max((spec.dtype.itemsize for call in calls for spec in call.inputs), default=1)
    return [_rank(number, call, plan, in_place, itemsize) for number, (call, plan) in enumerate(zip(calls, plans, strict=True))]


def _rank(number: int, call: Call, plan: Plan, in_place: bool, itemsize: int) -> _Rank:
    strips: dict[tuple[Buffer, int], SymbolicArray] = {}
    for item, spec in enumerate(call.inputs):
        count = math.prod(spec.shape)
        strips[Buffer.IN, item] = SymbolicArray([(count, 0, Term(f"x{number}", (number,), item))])
    for item, count in enumerate(plan.work_items):
        strips[Buffer.WORK, item] = SymbolicArray([(count, 0, None)])
    own = overwritable(call.operation, number) if in_place and call.inputs else None
    if own is not None:
        strips[Buffer.OUT, 0] = strips[Buffer.IN, own]
    return _Rank(plan, strips, call.wire is not None, {number}, EAGER_BYTES // itemsize)


def _advance_all(ranks: Sequence[_Rank]) -> None:
    for newcomer in range(len(ranks)):
        _enter(newcomer, ranks)


def _enter(newcomer: int, ranks: Sequence[_Rank]) -> None:
    """Lets one more rank enter, and advances those that have entered until none can continue."""
    ranks[newcomer].has_entered = True
    moving = deque(number for number, other in enumerate(ranks) if other.has_entered)
    while moving:
        moving += _advance(moving.popleft(), ranks)


def _advance(number: int, ranks: Sequence[_Rank]) -> list[int]:
    """Advances one rank as far as possible. Returns the ranks it has sent messages to, which may continue now."""
    rank = ranks[number]
    start = rank.position
    try:
        while rank.position < len(rank.plan.actions) and _do(rank.plan.actions[rank.position], number, ranks):
            rank.position += 1
    except _Unsound as problem:
        raise _Unsound(f"rank {number}, action {rank.position}: {problem}") from None
    sent = {action.peer for action in rank.plan.actions[start : rank.position] if isinstance(action, Send)}
    return [peer for peer in sent if ranks[peer].has_entered]


def _do(action: Action, number: int, ranks: Sequence[_Rank]) -> bool:
    rank = ranks[number]
    if isinstance(action, Receive | Fold | FoldUnder):
        return rank.take(action)
    if not isinstance(action, Send):
        rank.local(action)
        return True
    if action.peer == number or not 0 <= action.peer < len(ranks):
        raise _Unsound(f"it sends to rank {action.peer}")
    inbox = ranks[action.peer].inbox
    if (number, action.slot) in inbox:
        raise _Unsound(f"slot {action.slot} to rank {action.peer} is used twice")
    piece = rank.read(action.region)
    if not ranks[action.peer].has_entered and length(piece) > rank.eager_items:
        return False
    inbox[number, action.slot] = (_rounded(piece) if rank.compresses else piece, set(rank.heard))
    return True


def _unfinished(ranks: Sequence[_Rank]) -> Iterator[str]:
    for number, rank in enumerate(ranks):
        if rank.position < len(rank.plan.actions):
            yield f"rank {number} waits for ever at action {rank.position}: {rank.plan.actions[rank.position]}"
        for source, slot in rank.inbox:
            yield f"rank {number} never takes message {slot} of rank {source}"


def _unheard(ranks: Sequence[_Rank]) -> Iterator[str]:
    for number, rank in enumerate(ranks):
        missing = set(range(len(ranks))) - rank.heard
        if missing:
            yield f"rank {number} leaves without word of {sorted(missing)}"


def _wrong_results(calls: Sequence[Call], number: int, rank: _Rank, rank_order: bool) -> Iterator[str]:
    expected = _expected(calls, number)
    if rank.plan.out_items != len(expected):
        yield f"rank {number} has {rank.plan.out_items} results, not {len(expected)}"
    for item, (source, source_item) in enumerate(expected):
        where = f"rank {number}, result {item}"
        strip = rank.strips.get((Buffer.OUT, item), SymbolicArray())
        count = math.prod(calls[source or 0].inputs[source_item].shape)
        if len(strip) != count:
            yield f"{where} has {len(strip)} elements, not {count}"
        position = 0
        for run in strip.cut(0, len(strip)):
            problem = _wrong(run, source, source_item, position, len(calls), rank_order)
            if problem:
                yield f"{where}, elements {position} to {position + run[0]}: {problem}"
            position += run[0]


def _expected(calls: Sequence[Call], number: int) -> list[tuple[int | None, int]]:
    """For each result of a rank: the rank whose array it is (None: the reduction of all), and the index of that array."""
    everyone, root = range(len(calls)), calls[0].root
    table: dict[Operation, list[tuple[int | None, int]]] = {
        Operation.ALL_REDUCE: [(None, 0)],
        Operation.REDUCE: [(None, 0)] if number == root else [],
        Operation.REDUCE_SCATTER: [(None, number)],
        Operation.BROADCAST: [(root, 0)],
        Operation.GATHER: [(peer, 0) for peer in everyone] if number == root else [],
        Operation.SCATTER: [(root, number)],
        Operation.ALL_GATHER: [(peer, 0) for peer in everyone],
        Operation.ALL_TO_ALL: [(peer, number) for peer in everyone],
    }
    return table[calls[0].operation]


def _wrong(run: Run, source: int | None, item: int, position: int, size: int, rank_order: bool) -> str:
    """What is wrong with one run of a result; "" when nothing is."""
    _, first, term = run
    if term is None:
        return "never written"
    if (term.item, first) != (item, position):
        return f"{term.text} was element {first} of array {term.item}"
    if source is not None:
        return "" if term.ranks == (source,) else f"{term.text} is not what rank {source} brought"
    everyone = tuple(range(size))
    if tuple(sorted(term.ranks)) != everyone:
        return f"{term.text} does not hold every rank once"
    if size > 1 and not term.finished:
        return f"{term.text} was never finished"
    if rank_order and (term.ranks != everyone or not term.chain):
        return f"{term.text} is no left fold in rank order"
    return ""


def _disagreements(ranks: Sequence[_Rank]) -> Iterator[str]:
    results = [rank.strips.get((Buffer.OUT, 0), SymbolicArray()) for rank in ranks]
    first = results[0].cut(0, len(results[0]))
    for number, result in enumerate(results):
        for (_, _, own), (_, _, other) in aligned(first, result.cut(0, len(result))):
            if own is not None and other is not None and own.text != other.text:
                yield f"rank {number} ends with {other.text}, rank 0 with {own.text}"


def _folded(left: Sequence[Run], right: Sequence[Run]) -> list[Run]:
    if length(left) != length(right):
        raise _Unsound(f"{length(left)} elements are folded with {length(right)}")
    result: list[Run] = []
    for (count, first, one), (_, second, other) in aligned(left, right):
        if one is None or other is None:
            raise _Unsound("a fold of what was never written")
        if (one.item, first) != (other.item, second):
            raise _Unsound(f"{one.text} of element {first} is folded with {other.text} of element {second}")
        if one.finished or other.finished:
            raise _Unsound(f"{one.text} is folded with {other.text} after it was finished")
        result.append((count, first, fold(one, other)))
    return result


def _rounded(piece: Sequence[Run]) -> list[Run]:
    return [(count, first, term and replace(term, text=f"q({term.text})")) for count, first, term in piece]
