"""Rabenseifner's algorithm: recursive halving reduces, recursive doubling gathers; each step moves half of what the last did.

Idea. Partners at distance 1, 2, 4, ... each keep one half of what they still reduce and send the other, so after k steps
every rank holds one complete slice of 2^k. The same way back, every step doubles what a rank has of the result. Latency grows
with log p as in recursive doubling, while no link carries more than in a ring. Partners compute lower op upper, and distances
grow: every element is folded exactly as recursive doubling folds it, with the same bits.

Source. Rabenseifner, "Optimization of Collective Reduction Operations", 2004. (There distances shrink; here they grow, for the
sake of the order.)

Cost, for n bytes a rank on p ranks, with k = floor(log2 p) and q = 2^k: 2k rounds, 2 n (q-1)/q bytes sent and n (q-1)/q folded
by each rank; where p is no power of two, two more rounds, with n more bytes sent and folded.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.hypercube import FIRST_ROUND, HAND_BACK, HAND_OVER, Hypercube, hand_over
from ferrorpc.collectives.algorithms.partition import joined, slices
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Finish, Fold, FoldUnder, Load, Plan, Receive, Region, Send


def all_reduce(count: int, rank: int, size: int) -> Plan:
    """Any number of ranks; every rank ends with the same bits."""
    if count == 0:
        return Plan(())
    own, result = Region(Buffer.IN, 0, 0, count), Region(Buffer.OUT, 0, 0, count)
    cube = Hypercube(size)
    place = cube.place(rank)
    if place is None:
        return Plan(hand_over(rank, own, result))
    walk = _Walk(cube, place, count)
    actions = walk.halving(Buffer.WORK if cube.is_paired(rank) else Buffer.IN)
    if cube.is_paired(rank):
        total = Region(Buffer.WORK, 0, 0, count)
        actions = [Load(own, total), Fold(rank + 1, HAND_OVER, total), *actions]
    actions += walk.doubling()
    if cube.is_paired(rank):
        actions.append(Send(rank + 1, HAND_BACK, result))
    return Plan(tuple(actions), work_items=(count,))


class _Walk:
    """One place's way through the cube: the slices it has after each step, and those its partner has then."""

    def __init__(self, cube: Hypercube, place: int, count: int) -> None:
        self._cube = cube
        self._place = place
        self._cuts = slices(count, cube.count)
        self._kept: list[tuple[int, int]] = []
        self._given: list[tuple[int, int]] = []
        low, high = 0, cube.count
        for step in range(cube.steps):
            middle = (low + high) // 2
            lower, upper = (low, middle), (middle, high)
            kept, given = (upper, lower) if place >> step & 1 else (lower, upper)
            self._kept.append(kept)
            self._given.append(given)
            low, high = kept

    def _region(self, buffer: Buffer, run: tuple[int, int]) -> Region:
        return joined(buffer, self._cuts, *run)

    def _peer(self, step: int) -> tuple[int, bool]:
        """The partner's rank in a step, and whether it is above."""
        partner = self._place ^ (1 << step)
        return self._cube.rank(partner), partner > self._place

    def halving(self, first: Buffer) -> list[Action]:
        """The first way; the first step sends from `first`, which saves loading what is given away at once."""
        actions: list[Action] = []
        for step, (kept, given) in enumerate(zip(self._kept, self._given, strict=True)):
            peer, above = self._peer(step)
            total = self._region(Buffer.WORK, kept)
            source = first if step == 0 else Buffer.WORK
            outgoing = self._region(source, given)
            if not outgoing.is_empty:
                actions.append(Send(peer, FIRST_ROUND + step, outgoing))
            if source is Buffer.IN and not total.is_empty:
                actions.append(Load(self._region(source, kept), total))
            if not total.is_empty:
                actions.append((Fold if above else FoldUnder)(peer, FIRST_ROUND + step, total))
        return actions

    def doubling(self) -> list[Action]:
        """The way back: what was kept is complete and goes to the partner, for what was given away."""
        total, result = (self._region(buffer, self._kept[-1]) for buffer in (Buffer.WORK, Buffer.OUT))
        actions: list[Action] = [] if result.is_empty else [Finish(total, result)]
        for step in reversed(range(self._cube.steps)):
            peer, _ = self._peer(step)
            slot = FIRST_ROUND + self._cube.steps + step
            outgoing, incoming = (self._region(Buffer.OUT, runs[step]) for runs in (self._kept, self._given))
            if not outgoing.is_empty:
                actions.append(Send(peer, slot, outgoing))
            if not incoming.is_empty:
                actions.append(Receive(peer, slot, incoming))
        return actions
