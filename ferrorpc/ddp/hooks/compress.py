"""Sends narrower numbers: those of a codec of wire/codecs.py, such as bf16, or int8 in blocks with one scale each.

Idea. Each value is rounded once before it is sent to the rank that adds it up, and the mean once before it is sent back: unlike
the sum, it fits float16 where all ranks' values do. Sums are float32; nothing is added in the narrow type. With error feedback,
the rank that added up keeps what the second rounding left out, and adds it to its next mean.

Source. The quantised all-reduce of ZeRO++ (Wang et al., 2023) in two phases; the feedback of both roundings is that of
DoubleSqueeze (Tang et al., 2019); codecs are those of `wire=` (wire/codecs.py).

Cost, relative to float32: bf16 and f16 half, int8 1/4 + 1/256.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.hooks.base import Exchange, Hook, Part
from ferrorpc.ddp.hooks.vector_ops import VectorOps, vector_ops_for
from ferrorpc.kernels.cuda.codecs import DEVICE_CODECS
from ferrorpc.operations.stream import Stream
from ferrorpc.types import ReduceOp
from ferrorpc.wire.codecs import codec


class Compress(Hook):
    """Sends values as "bf16", "f16" or "int8". Raises UsageError for another name."""

    operations = 2
    remembers = False

    def __init__(self, wire: str) -> None:
        self._codec = codec(wire)
        self.on_device = wire in DEVICE_CODECS

    def serve(self, stream: Stream, keys: Iterable[str]) -> None:
        """As its base, but raises UsageError also where the group's backend compresses nothing."""
        stream.check_wire(self._codec.name)
        super().serve(stream, keys)

    @property
    def text(self) -> str:
        return self._codec.name

    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        ops = vector_ops_for(part.values)
        if part.wants_delivered:
            return (yield from self._in_two_halves(part, collectives, ops))
        yield collectives.all_reduce(part.values, ReduceOp.MEAN, self._codec.name)
        ops.scale(part.values, collectives.size)
        return None

    def _in_two_halves(self, part: Part, collectives: BucketCollectives, ops: VectorOps) -> Exchange:
        """As all_reduce does it; between them the mean of this rank's slice gets what its last rounding left out."""
        codec, size, count = self._codec, collectives.size, part.values.size
        # Slices of whole blocks: rounding the values again on the wire changes nothing.
        length = -(-count // (size * codec.block_values)) * codec.block_values
        padded = ops.zeros(size * length)
        slices = [padded[rank * length : (rank + 1) * length] for rank in range(size)]
        ops.decode(codec, ops.encoded(codec, part.values), padded[:count])
        delivered = padded[:count].copy()
        rest = None
        if part.residues is not None and part.total_weight is not None:
            key = f"{part.key}/mean/{collectives.rank}/{size}"
            if key not in part.residues.kept:
                part.residues.forget(f"{part.key}/mean/")  # those of another slice, in a world of another size
            rest = part.residues.of(key, length, ops)
        mean = yield collectives.reduce_scatter(slices, ReduceOp.MEAN, codec.name)
        if rest is not None and part.total_weight is not None:
            # It is kept as of the gradients' mean, not of what is summed here: so it fits the next step, whatever its weights.
            total = yield from part.total_weight()
            term = rest.copy()
            ops.scale(term, total / size)
            ops.add(mean, term)
        gathered = yield collectives.all_gather(ops.encoded(codec, mean))
        for each, encoded in zip(slices, gathered, strict=True):
            ops.decode(codec, encoded, each)
        if rest is not None:
            ops.assign(rest, mean)
            ops.subtract_delivered(rest, slices[collectives.rank])
            ops.scale(rest, size / total if total else math.inf)
            for each in (rest, *slices):
                ops.forget_unless_finite(rest, each)
        ops.assign(part.values, padded[:count])
        ops.scale(part.values, size)
        return delivered
