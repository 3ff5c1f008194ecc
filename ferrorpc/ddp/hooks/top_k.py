"""Sends only the largest values, with their indices.

Idea. Each rank sends the values of largest magnitude in a bucket, as (index, value) pairs, to every other rank; all ranks add
them up in rank order. Meant for use with error feedback, where small values accumulate until they are large.

Source. Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017.

Cost, for k of n values on p ranks: 8 k (p-1) bytes sent, where the plain bucket takes 8 n (p-1)/p; so it saves bytes for k <
n/p.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.hooks.base import Exchange, Hook, Part
from ferrorpc.errors import UsageError


class TopK(Hook):
    """Sends the `share` (0 < share <= 1) of each bucket's values with the largest magnitude, at least one value."""

    remembers = False

    def __init__(self, share: float) -> None:
        given: Any = share
        if not isinstance(given, Real) or not 0 < share <= 1:
            raise UsageError(f"share={share!r} is no share of the values", hint="pass more than 0 and at most 1, such as 0.01")
        self._share = share

    @property
    def text(self) -> str:
        return f"top {self._share:g}"

    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        values = part.values
        count = min(values.size, max(1, math.ceil(values.size * self._share)))
        with np.errstate(invalid="ignore"):
            indices = np.argpartition(np.abs(values), values.size - count)[values.size - count :].astype(np.uint32)
        indices.sort()
        message = np.concatenate([indices, values[indices].view(np.uint32)])
        delivered = None
        if part.wants_delivered:
            delivered = np.zeros_like(values)
            delivered[indices] = values[indices]
        gathered = yield collectives.all_gather(message)
        values[...] = 0
        for each in gathered:
            where, numbers = np.split(each, 2)
            with np.errstate(all="ignore"):
                values[where] += numbers.view(np.float32)
        return delivered
