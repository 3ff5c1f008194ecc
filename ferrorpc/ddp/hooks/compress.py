"""Sends narrower numbers: bf16, f16, or int8 in blocks of 256 with one scale each.

Idea. Each value is rounded once before it is sent to the rank that adds it up, and the sum once before it is sent back. Sums
are float32; nothing is added in the narrow type.

Source. The quantised all-reduce of ZeRO++ (Wang et al., 2023) in two phases; codecs are those of `wire=` (wire/codecs.py).

Cost, relative to float32: bf16 and f16 half, int8 1/4 + 1/256.
"""

from __future__ import annotations

from collections.abc import Iterable

from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.hooks.base import Exchange, Hook, Part
from ferrorpc.ddp.hooks.vector_ops import vector_ops_for
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES
from ferrorpc.operations.stream import Stream
from ferrorpc.wire.codecs import codec


class Compress(Hook):
    """Sends values as "bf16", "f16" or "int8". Raises UsageError for another name."""

    on_device = True
    remembers = False

    def __init__(self, wire: str) -> None:
        self._codec = codec(wire)

    def serve(self, stream: Stream, keys: Iterable[str]) -> None:
        """As its base, but raises UsageError also where the group's backend compresses nothing."""
        stream.check_wire(self._codec.name)
        super().serve(stream, keys)

    @property
    def text(self) -> str:
        return self._codec.name

    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        if not part.wants_delivered:
            yield collectives.all_reduce(part.values, wire=self._codec.name)
            return None
        # Padded so that every rank's slice is whole blocks: rounding the values again on the wire then changes nothing.
        count, unit = part.values.size, collectives.size * BLOCK_VALUES
        ops = vector_ops_for(part.values)
        padded = ops.zeros(-(-count // unit) * unit)
        delivered = ops.rounded(self._codec, part.values)
        ops.assign(padded[:count], delivered)
        yield collectives.all_reduce(padded, wire=self._codec.name)
        ops.assign(part.values, padded[:count])
        return delivered
