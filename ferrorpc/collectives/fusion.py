"""Fuses the actions that compute one reduced region into a single task, so that its operands are read once.

Idea. The direct algorithms load or receive the first operand, fold in the others and finish, so the accumulator is read and
written once for every rank. Once a chunk of every operand is here, one kernel does all of that in one pass, in the same order
and with the same bits. The price is that chunks of fast ranks wait for that of the slowest; they would anyway, unless the
slowest rank is the last to be folded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ferrorpc.collectives.algorithms.plan import Action, Buffer, Finish, Fold, FoldOwn, Load, Plan, Receive, Region


@dataclass(frozen=True, slots=True)
class Incoming:
    """Message `slot` of group rank `peer`, as an operand."""

    peer: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """OUT region = the left fold of the operands, regions of IN and messages, finished."""

    operands: tuple[Region | Incoming, ...]
    region: Region

    @property
    def messages(self) -> list[Incoming]:
        """Its operands that are messages."""
        return [operand for operand in self.operands if isinstance(operand, Incoming)]


@dataclass(frozen=True, slots=True)
class DownloadInput:
    """IN region = an array that is copied from a GPU."""

    region: Region


@dataclass(frozen=True, slots=True)
class UploadResult:
    """An OUT region is copied to a GPU."""

    region: Region


Task: TypeAlias = Action | Reduce | DownloadInput | UploadResult
"""What an executor does: an action of the plan, several of them fused, or a copy from or to a GPU."""


def fused(plan: Plan) -> tuple[Task, ...]:
    """The plan's actions in their order, with each run of them that computes one reduced region fused.

    Such a run uses one region of WORK as accumulator, and nothing else touches that array.
    """
    tasks: list[Task] = []
    index = 0
    while index < len(plan.actions):
        length = _run(plan.actions, index)
        if length:
            tasks.append(_fuse(plan.actions[index : index + length]))
        else:
            tasks.append(plan.actions[index])
        index += max(length, 1)
    return tuple(tasks)


def used_work(tasks: tuple[Task, ...], plan: Plan) -> tuple[int, ...]:
    """Element counts of the WORK arrays, 0 for those that fusing has made unnecessary."""
    used = {region.item for task in tasks for region in _regions(task) if region.buffer is Buffer.WORK}
    return tuple(count if item in used else 0 for item, count in enumerate(plan.work_items))


def _run(actions: tuple[Action, ...], first: int) -> int:
    """How many actions from `first` on can be fused; 0 for none."""
    opening = actions[first]
    work = opening.region
    if work.buffer is not Buffer.WORK or not (isinstance(opening, Receive) or _loads(opening)):
        return 0
    last = first + 1
    while last < len(actions) and _folds(actions[last], work):
        last += 1
    closing = actions[last] if last < len(actions) else None
    if not (isinstance(closing, Finish) and closing.source == work and last > first + 1):
        return 0
    elsewhere = (*actions[:first], *actions[last + 1 :])
    touched = any(region.buffer is Buffer.WORK and region.item == work.item for each in elsewhere for region in _regions(each))
    return 0 if touched else last + 1 - first


def _loads(action: Action) -> bool:
    return isinstance(action, Load) and action.source.buffer is Buffer.IN


def _folds(action: Action, work: Region) -> bool:
    if action.region != work:
        return False
    return isinstance(action, Fold) or (isinstance(action, FoldOwn) and action.source.buffer is Buffer.IN)


def _fuse(actions: tuple[Action, ...]) -> Reduce:
    operands: list[Region | Incoming] = []
    for action in actions:
        if isinstance(action, Receive | Fold):
            operands.append(Incoming(action.peer, action.slot))
        elif isinstance(action, Load | FoldOwn):
            operands.append(action.source)
    return Reduce(tuple(operands), actions[-1].region)


def _regions(task: Task) -> list[Region]:
    """Every region that a task reads or writes."""
    if isinstance(task, Reduce):
        return [task.region, *(operand for operand in task.operands if isinstance(operand, Region))]
    source: Region | None = getattr(task, "source", None)
    return [task.region] if source is None else [source, task.region]
