"""Hill climbing: swaps two adjacent actions of a rank, and keeps the swap if the whole schedule gets faster.

It never returns a slower schedule than it was given, nor one that holds more than the cap. Each trial goes once over all
actions. The number of trials is bounded, so the cost is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ferrorpc.pipeline.actions import Action, B, F, I, Kind, W
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.table import peak_of


class MakespanModel:
    """Computes the makespan of different orders of a schedule's actions, faster than a full simulation.

    Args:
        schedule: a sound schedule.
        costs: (kind, piece) -> time units.
        latency: of a message between ranks.
    """

    def __init__(self, schedule: Schedule, costs: Mapping[tuple[Kind, int], float], latency: float) -> None:
        placement = schedule.placement
        actions = {each for row in schedule.actions for each in row}
        self._cost = {each: costs[each.kind, each.stage] for each in actions}
        self._needs: dict[Action, list[tuple[Action, float]]] = {each: [] for each in actions}
        for each in actions:
            for other in _needed(each):
                if other in actions:
                    delay = 0.0 if placement[other.stage] == placement[each.stage] else latency
                    self._needs[each].append((other, delay))

    def makespan(self, rows: Sequence[Sequence[Action]]) -> float:
        """When the last action ends; infinity if actions wait for each other for ever."""
        ends: dict[Action, float] = {}
        place, free = [0] * len(rows), [0.0] * len(rows)
        moving = True
        while moving:
            moving = False
            for rank, row in enumerate(rows):
                while place[rank] < len(row) and (start := self._start(row[place[rank]], free[rank], ends)) is not None:
                    each = row[place[rank]]
                    free[rank] = ends[each] = start + self._cost[each]
                    place[rank] += 1
                    moving = True
        return max(free) if all(place[rank] == len(row) for rank, row in enumerate(rows)) else float("inf")

    def _start(self, each: Action, free: float, ends: Mapping[Action, float]) -> float | None:
        for other, delay in self._needs[each]:
            end = ends.get(other)
            if end is None:
                return None
            free = max(free, end + delay)
        return free


def improve(
    schedule: Schedule,
    costs: Mapping[tuple[Kind, int], float],
    latency: float,
    caps: Sequence[int] | None,
    trials: int,
) -> tuple[float, Schedule]:
    """The makespan of the fastest schedule found, and that schedule; without a faster one it has the same order.

    Args:
        costs: (kind, piece) -> time units.
        caps: how many activations each rank may hold, counted in pieces; None for any number.
        trials: how many orders are tried.
    """
    model = MakespanModel(schedule, costs, latency)
    rows = [list(row) for row in schedule.actions]
    best = model.makespan(rows)
    tried = 0
    gained = True
    while gained and tried < trials:
        gained = False
        for rank, place in _swappable(rows):
            row = rows[rank]
            row[place], row[place + 1] = row[place + 1], row[place]
            tried += 1
            found = model.makespan(rows) if caps is None or peak_of(row) <= caps[rank] else float("inf")
            if found < best - 1e-9:
                best, gained = found, True
            else:
                row[place], row[place + 1] = row[place + 1], row[place]
            if tried >= trials:
                break
    return best, Schedule.of("searched", rows)


def _needed(each: Action) -> Iterator[Action]:
    stage, kind, microbatch = each
    if kind is F:
        yield Action(stage - 1, F, microbatch)
    elif kind is W:
        yield Action(stage, I, microbatch)
    else:
        yield Action(stage, F, microbatch)
        yield Action(stage + 1, I, microbatch)
        yield Action(stage + 1, B, microbatch)


def _swappable(rows: Sequence[Sequence[Action]]) -> Iterator[tuple[int, int]]:
    """(rank, place) of actions that may be swapped with the next: each kind keeps a piece's microbatches in ascending order."""
    for rank, row in enumerate(rows):
        for place in range(len(row) - 1):
            first, second = row[place], row[place + 1]
            same = first.stage == second.stage and (first.kind is second.kind or first.microbatch == second.microbatch)
            if not same:
                yield rank, place
