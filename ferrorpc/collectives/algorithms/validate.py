"""Proving plans right without running them: all ranks together, on symbols instead of numbers.

Ranks are advanced in turn, each through its actions in order, until nobody can go on. That shows deadlocks, messages that
nobody takes or nobody sends, and, in the terms that arrive in OUT, whether each result holds every rank's part exactly once,
in which order, and alike on all ranks. The whole is done a second time with OUT in the memory of IN, as for
`all_reduce(x, out=x)`.
"""

from __future__ import annotations

import math
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
from ferrorpc.collectives.algorithms.symbols import Run, Term, aligned, cut, fold, length, paste
from ferrorpc.collectives.call import Call, Operation


class _Unsound(Exception):
    """An action cannot be done at all; becomes a finding."""


@dataclass
class _Rank:
    """One rank on its way through its plan."""

    plan: Plan
    strips: dict[tuple[Buffer, int], list[Run]]
    compresses: bool
    heard: set[int]
    position: int = 0
    inbox: dict[tuple[int, int], tuple[list[Run], set[int]]] = field(default_factory=dict)

    def read(self, region: Region) -> list[Run]:
        if region.stop == region.start:
            return []
        strip = self.strips.get((region.buffer, region.item))
        if strip is None:
            raise _Unsound(f"{region} is used before it exists")
        stop = length(strip) if region.stop is None else region.stop
        piece = cut(strip, region.start, stop)
        if stop > length(strip):
            raise _Unsound(f"{region} ends behind its array")
        if any(term is None for _, term in piece):
            raise _Unsound(f"{region} is read before it is written")
        return piece

    def write(self, region: Region, piece: Sequence[Run]) -> None:
        if region.buffer is Buffer.IN:
            raise _Unsound(f"{region} is written, which belongs to the caller")
        if region.buffer is Buffer.WORK and (Buffer.WORK, region.item) not in self.strips:
            raise _Unsound(f"{region} has no room")
        strip = self.strips.setdefault((region.buffer, region.item), [])
        if region.stop is None:
            strip[:] = piece
            return
        if region.stop - region.start != length(piece):
            raise _Unsound(f"{region} gets {length(piece)} elements")
        if region.buffer is Buffer.WORK and region.stop > length(strip):
            raise _Unsound(f"{region} ends behind its array")
        strip[:] = paste(strip, region.start, piece)

    def local(self, action: Action) -> None:
        """An action that needs no message."""
        if isinstance(action, Load | Copy):
            self.write(action.region, self.read(action.source))
        elif isinstance(action, Finish):
            self.write(
                action.region, [(count, term and replace(term, finished=True)) for count, term in self.read(action.source)]
            )
        elif isinstance(action, FoldOwn):
            self.write(action.region, _folded(self.read(action.region), self.read(action.source)))
        elif isinstance(action, Quantise):
            self.write(action.region, _rounded(self.read(action.region)))

    def take(self, action: Receive | Fold | FoldUnder) -> bool:
        """An action that needs a message: False while it has not come."""
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
        rank_order: whether the algorithm claims the canonical left fold in rank order.
    """
    found = _run(calls, plans, rank_order, in_place=False)
    return found or [f"in place: {text}" for text in _run(calls, plans, rank_order, in_place=True)]


def _run(calls: Sequence[Call], plans: Sequence[Plan], rank_order: bool, in_place: bool) -> list[str]:
    ranks = [_enter(number, call, plan, in_place) for number, (call, plan) in enumerate(zip(calls, plans, strict=True))]
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


def _enter(number: int, call: Call, plan: Plan, in_place: bool) -> _Rank:
    strips: dict[tuple[Buffer, int], list[Run]] = {}
    for item, spec in enumerate(call.inputs):
        count = math.prod(spec.shape)
        strips[Buffer.IN, item] = [(count, Term(f"x{number}", (number,), item))] if count else []
    for item, count in enumerate(plan.work_items):
        strips[Buffer.WORK, item] = [(count, None)] if count else []
    if in_place and call.inputs:
        if call.operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST):
            strips[Buffer.OUT, 0] = strips[Buffer.IN, 0]
        elif call.operation is Operation.REDUCE_SCATTER:
            strips[Buffer.OUT, 0] = strips[Buffer.IN, number]
    return _Rank(plan, strips, call.wire is not None, {number})


def _advance_all(ranks: Sequence[_Rank]) -> None:
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            before = rank.position
            try:
                while rank.position < len(rank.plan.actions) and _do(rank.plan.actions[rank.position], number, ranks):
                    rank.position += 1
            except _Unsound as problem:
                raise _Unsound(f"rank {number}, action {rank.position}: {problem}") from None
            moved = moved or rank.position > before


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
        strip = rank.strips.get((Buffer.OUT, item), [])
        count = math.prod(calls[source or 0].inputs[source_item].shape)
        if length(strip) != count:
            yield f"{where} has {length(strip)} elements, not {count}"
        position = 0
        for run, term in strip:
            problem = _wrong(term, source, source_item, position, len(calls), rank_order)
            if problem:
                yield f"{where}, elements {position} to {position + run}: {problem}"
            position += run


def _expected(calls: Sequence[Call], number: int) -> list[tuple[int | None, int]]:
    """For each result of a rank: whose array it is (None: the reduction of all), and which of theirs."""
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


def _wrong(term: Term | None, source: int | None, item: int, position: int, size: int, rank_order: bool) -> str:
    """What is wrong with one run of a result; "" when nothing is."""
    if term is None:
        return "never written"
    if (term.item, term.first) != (item, position):
        return f"{term.text} was element {term.first} of array {term.item}"
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
    first = ranks[0].strips.get((Buffer.OUT, 0), [])
    for number, rank in enumerate(ranks):
        for _, own, other in aligned(first, rank.strips.get((Buffer.OUT, 0), [])):
            if own is not None and other is not None and own.text != other.text:
                yield f"rank {number} ends with {other.text}, rank 0 with {own.text}"


def _folded(left: Sequence[Run], right: Sequence[Run]) -> list[Run]:
    if length(left) != length(right):
        raise _Unsound(f"{length(left)} elements are folded with {length(right)}")
    result: list[Run] = []
    for count, one, other in aligned(left, right):
        if one is None or other is None:
            raise _Unsound("a fold of what was never written")
        if (one.item, one.first) != (other.item, other.first):
            raise _Unsound(f"{one.text} of element {one.first} is folded with {other.text} of element {other.first}")
        if one.finished or other.finished:
            raise _Unsound(f"{one.text} is folded with {other.text} after it was finished")
        result.append((count, fold(one, other)))
    return result


def _rounded(piece: Sequence[Run]) -> list[Run]:
    return [(count, term and replace(term, text=f"q({term.text})")) for count, term in piece]
