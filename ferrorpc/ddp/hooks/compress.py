"""Narrower numbers on the wire: bf16, f16, or int8 in blocks of 256 with one scale each.

Idea. Each value is rounded once on its way to the rank that adds it up, and the sum once on its way back; sums are float32.
Nothing is ever added in the narrow type.

Source. The quantised all-reduce of ZeRO++ (Wang et al., 2023) in two rounds; codecs are those of `wire=` (wire/codecs.py).

Cost, of the bytes of float32: bf16 and f16 half, int8 1/4 + 1/256.
"""

from __future__ import annotations

from ferrorpc.ddp.hooks.base import Exchange, Hook, Part
from ferrorpc.ddp.hooks.values import values_like
from ferrorpc.ddp.lane import Lane
from ferrorpc.wire.codecs import BLOCK_VALUES, codec


class Compress(Hook):
    """Values as "bf16", "f16" or "int8" on the wire. Raises UsageError for another name."""

    on_device = True
    remembers = False

    def __init__(self, wire: str) -> None:
        self._codec = codec(wire)

    @property
    def text(self) -> str:
        return self._codec.name

    def exchange(self, part: Part, lane: Lane) -> Exchange:
        if not part.wants_delivered:
            yield lane.all_reduce(part.values, wire=self._codec.name)
            return None
        # Cut into slices of whole blocks, so that the wire rounds values again to what they were rounded to here.
        count, unit = part.values.size, lane.size * BLOCK_VALUES
        place = values_like(part.values)
        padded = place.zeros(-(-count // unit) * unit)
        delivered = place.rounded(self._codec, part.values)
        place.assign(padded[:count], delivered)
        yield lane.all_reduce(padded, wire=self._codec.name)
        place.assign(part.values, padded[:count])
        return delivered
