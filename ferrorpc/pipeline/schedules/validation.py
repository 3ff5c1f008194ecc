"""Validates a schedule's table: one function for each rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import Action, B, F, I, Kind, W
from ferrorpc.pipeline.schedules.lowering import Lowering, has_messages, with_messages
from ferrorpc.pipeline.schedules.table import Table
from ferrorpc.plans.simulate import blocked
from ferrorpc.types import integer_of, number_of

MISSING_LISTED_MOST: Final = 10_000
"""If at least so many actions are missing, they are not listed one by one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a schedule.

    Attributes:
        rule: "empty", "placement", "missing", "duplicate", "edges", "order", "message", "deadlock" or "peak".
        message: what is wrong.
        rank: on which rank; None if it concerns several.
    """

    rule: str
    message: str
    rank: int | None = None

    def __str__(self) -> str:
        return self.message if self.rank is None else f"rank {self.rank}: {self.message}"


def findings(table: Table, credits: int | None = None, peak: float | None = None) -> list[Finding]:
    """As `Schedule.validate`. Findings that are only consequences of earlier ones are not listed."""
    if credits is not None:
        credits = _checked_credits(credits)
    if peak is not None:
        peak = checked_cap(peak, "peak")
    if not table.microbatches or not all(table.actions):
        idle = [rank for rank, row in enumerate(table.actions) if not row]
        return [Finding("empty", f"nothing to do for ranks {idle}" if idle else "no rank has anything to do")]
    found = list(_far_off(table)) or [*_misplaced(table), *_miscounted(table)] or list(_miswired(table))
    if not found:
        found = [*_misordered(table), *_unpaired(table)]
    if not found:
        found = list(_deadlocked(table, credits))
    if peak is not None:
        found += _over(table, peak)
    return found


def _checked_credits(value: Any) -> int:
    credits = integer_of(value)
    if credits < 0:
        raise UsageError(f"credits={value!r} is no number of messages", hint="pass 0 or more, or None for any number")
    return credits


def checked_cap(value: Any, what: str) -> float:
    """A cap on activations. Raises UsageError if it is no number; infinity is one."""
    cap = number_of(value)
    if not cap > -math.inf:  # nor NaN
        raise UsageError(f"{what}={value!r} is no number of activations", hint="give a number, or None for any")
    return cap


def _far_off(table: Table) -> Iterator[Finding]:
    """Where a number is far beyond all others: one finding, instead of one for each of millions of missing actions."""
    there = sum(map(len, table.actions))
    if table.virtual_stages * table.microbatches > there + MISSING_LISTED_MOST:
        counts = f"{table.virtual_stages} stages and {table.microbatches} microbatches"
        yield Finding("missing", f"{there} actions are far too few for {counts}, which the largest numbers among them say")


def _misplaced(table: Table) -> Iterator[Finding]:
    holders: dict[int, set[int]] = {}
    for rank, row in enumerate(table.actions):
        for each in row:
            holders.setdefault(each.stage, set()).add(rank)
    for stage in range(table.virtual_stages):
        ranks = sorted(holders.get(stage, ()))
        if len(ranks) > 1:
            yield Finding("placement", f"stage {stage} is on ranks {ranks}; a stage has one rank")


def _miscounted(table: Table) -> Iterator[Finding]:
    """Each stage has one forward and one backward of each microbatch; the backward is a B, or an I and a W."""
    count = Counter(each for row in table.actions for each in row)
    rank_of = table.placement
    for each, times in count.items():
        if times > 1:
            yield Finding("duplicate", f"{each} is there {times} times", rank_of[each.stage])
    for stage in range(table.virtual_stages):
        rank = rank_of[stage] if rank_of[stage] >= 0 else None
        for microbatch in range(table.microbatches):
            has = {kind: Action(stage, kind, microbatch) in count for kind in (F, B, I, W)}
            if not has[F]:
                yield Finding("missing", f"{Action(stage, F, microbatch)} is missing", rank)
            if has[B] and (has[I] or has[W]):
                names = " and ".join(str(Action(stage, kind, microbatch)) for kind in (B, I, W) if has[kind])
                yield Finding("duplicate", f"{names}: a backward is one B, or an I and a W", rank)
            elif not has[B]:
                for kind in (kind for kind in (I, W) if not has[kind]):
                    yield Finding("missing", f"{Action(stage, kind, microbatch)} is missing, and so is a B in its place", rank)


def _miswired(table: Table) -> Iterator[Finding]:
    try:
        _ = table.edges
    except UsageError as error:
        yield Finding("edges", error.message)


def _misordered(table: Table) -> Iterator[Finding]:
    """On each rank a forward comes before its backward, and the input's gradient before the weights'."""
    first = {B: F, I: F, W: I}
    for rank, row in enumerate(table.actions):
        done: set[Action] = set()
        for each in row:
            if each.kind in first:
                before = Action(each.stage, first[each.kind], each.microbatch)
                if before not in done:
                    yield Finding("order", f"{each} comes before {before}", rank)
            done.add(each)


def _unpaired(table: Table) -> Iterator[Finding]:
    """If messages are explicit, each is sent after its value is computed, and received before it is used."""
    if not has_messages(table.actions):
        return
    compute = [[each for each in row if each.kind.computes] for row in table.actions]
    wanted = {each for row in with_messages(compute, table.placement, table.edges) for each in row if not each.kind.computes}
    found = {each for row in table.actions for each in row if not each.kind.computes}
    for each in sorted(wanted - found, key=str):
        yield Finding("message", f"{each} is missing", table.placement[each.stage])
    for each in sorted(found - wanted, key=str):
        yield Finding("message", f"{each}: nothing has to be sent there", table.placement[each.stage])
    for rank, row in enumerate(table.actions):
        place = {each: index for index, each in enumerate(row)}
        for each in (each for each in row if not each.kind.computes and each in wanted):
            partner = _partner(each, place)
            if each.kind.sends is (place[partner] > place[each]):
                relation = "before" if each.kind.sends else "after"
                yield Finding("message", f"{each} comes {relation} {partner}", rank)


def _partner(message: Action, place: dict[Action, int]) -> Action:
    """The action of the same rank that computes what is sent, or uses what is received."""
    kinds = (F,) if message.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else (B, I)
    return next(each for kind in kinds if (each := Action(message.stage, kind, message.microbatch)) in place)


def _deadlocked(table: Table, credits: int | None) -> Iterator[Finding]:
    rows = table.actions if credits is None else table.with_messages().actions
    for rank, each in blocked(Lowering(rows, table.placement, table.edges, {}, credits=credits).program()).items():
        if rank < table.stages:  # the other lanes are links, which are blocked because a rank is
            yield Finding("deadlock", f"never starts {each.task}, which needs {' and '.join(each.needs)}", rank)


def _over(table: Table, peak: float) -> list[Finding]:
    return [
        Finding("peak", f"holds {held:g} activations at once, more than {peak:g}", rank)
        for rank, held in enumerate(table.peak_activations)
        if held > peak + 1e-9
    ]
