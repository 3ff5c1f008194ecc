"""Only the largest values, with their places.

Idea. Of each bucket a rank sends the values of largest magnitude, as (place, value) pairs, to every other rank; all add them up
in rank order. Meant to go with error feedback: what is small now adds up until it is large.

Source. Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017.

Cost, for k of n values on p ranks: 8 k (p-1) bytes sent, where the plain bucket takes 8 n (p-1)/p; so it pays for k < n/p.
"""

from __future__ import annotations

import math

import numpy as np

from ferrorpc.ddp.hooks.base import Exchange, Hook, Part
from ferrorpc.ddp.lane import Lane
from ferrorpc.errors import UsageError


class TopK(Hook):
    """The `share` (0 < share <= 1) of each bucket's values that is largest in magnitude; at least one value."""

    remembers = False

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"share={share} is no share of the values", hint="pass more than 0 and at most 1, such as 0.01")
        self._share = share

    @property
    def text(self) -> str:
        return f"top {self._share:g}"

    def exchange(self, part: Part, lane: Lane) -> Exchange:
        values = part.values
        count = min(values.size, max(1, math.ceil(values.size * self._share)))
        with np.errstate(invalid="ignore"):
            places = np.argpartition(np.abs(values), values.size - count)[values.size - count :].astype(np.uint32)
        places.sort()
        message = np.concatenate([places, values[places].view(np.uint32)])
        delivered = None
        if part.wants_delivered:
            delivered = np.zeros_like(values)
            delivered[places] = values[places]
        everyones = yield lane.all_gather(message)
        values[...] = 0
        for each in everyones:
            theirs, numbers = np.split(each, 2)
            with np.errstate(all="ignore"):
                values[theirs] += numbers.view(np.float32)
        return delivered
