"""Bruck: blocks travel in bundles over distances 1, 2, 4, ..., so that log2(p) messages do what p-1 would.

Idea. In an all-gather, everyone sends all blocks it has to the rank 2^k before it, and so has twice as many. In an all-to-all,
block j has j places to go: in round k every block whose number has bit k set goes 2^k places on, all of them in one bundle.
Bundles are one message each, so blocks must be of equal size, and an all-to-all carries every block log2(p)/2 times: for small
blocks, where messages cost more than bytes.

Source. Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems", 1997.

Cost, for n bytes brought by each rank on p ranks, with k = ceil(log2 p): k rounds, k messages a rank;

    all_gather    (p-1) n bytes sent
    all_to_all    about k n/2 bytes sent
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Load, Plan, Receive, Region, Send

_BLOCKS = 0
"""The WORK array of blocks: block j of an all_gather belongs to rank + j, of an all_to_all has j places to go."""
_BUNDLE_OUT = 1
_BUNDLE_IN = 2


def all_gather(count: int, rank: int, size: int) -> Plan:
    """Arrays of `count` elements each, the same shape on every rank."""
    actions: list[Action] = [Load(Region(Buffer.IN, 0, 0, count), _blocks(count, 0, 1))]
    for step in range((size - 1).bit_length()):
        have = 1 << step
        more = min(have, size - have)
        if count:
            actions.append(Send((rank - have) % size, step, _blocks(count, 0, more)))
            actions.append(Receive((rank + have) % size, step, _blocks(count, have, have + more)))
    actions += [
        Copy(_blocks(count, block, block + 1), Region(Buffer.OUT, (rank + block) % size, 0, count)) for block in range(size)
    ]
    return Plan(tuple(actions), work_items=(size * count,), out_items=size, alike=True)


def all_to_all(count: int, rank: int, size: int) -> Plan:
    """Parts of `count` elements each, the same shape for and on every rank."""
    actions: list[Action] = [
        Load(Region(Buffer.IN, (rank + block) % size, 0, count), _blocks(count, block, block + 1)) for block in range(size)
    ]
    largest = 0
    for step in range((size - 1).bit_length()):
        runs = list(_runs(size, step))
        bundle = sum(last - first for first, last in runs) * count
        largest = max(largest, bundle)
        if not count:
            continue
        actions += [Load(_blocks(count, *run), place) for run, place in _packed(runs, count, _BUNDLE_OUT)]
        actions.append(Send((rank + (1 << step)) % size, step, Region(Buffer.WORK, _BUNDLE_OUT, 0, bundle)))
        actions.append(Receive((rank - (1 << step)) % size, step, Region(Buffer.WORK, _BUNDLE_IN, 0, bundle)))
        actions += [Load(place, _blocks(count, *run)) for run, place in _packed(runs, count, _BUNDLE_IN)]
    actions += [
        Copy(_blocks(count, block, block + 1), Region(Buffer.OUT, (rank - block) % size, 0, count)) for block in range(size)
    ]
    return Plan(tuple(actions), work_items=(size * count, largest, largest), out_items=size, alike=True)


def _blocks(count: int, first: int, last: int) -> Region:
    return Region(Buffer.WORK, _BLOCKS, first * count, last * count)


def _runs(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of the blocks whose number has bit `step` set."""
    length = 1 << step
    for first in range(length, size, 2 * length):
        yield first, min(first + length, size)


def _packed(runs: list[tuple[int, int]], count: int, item: int) -> Iterator[tuple[tuple[int, int], Region]]:
    """Each run, and where it lies in the bundle `item`."""
    position = 0
    for first, last in runs:
        after = position + (last - first) * count
        yield (first, last), Region(Buffer.WORK, item, position, after)
        position = after
