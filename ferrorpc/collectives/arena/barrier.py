"""The barrier in shared memory: nobody leaves before everyone has entered.

Idea. Each rank raises a word in its line, and reads those of the others until all are raised.

Cost: p words read by each of p ranks, and no byte moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrorpc.collectives.arena.board import LEFT, SIGNATURE, STAGED, Array, Channel
from ferrorpc.collectives.arena.execution import Steps
from ferrorpc.collectives.arena.prepared import ArenaPrepared


class Barrier(ArenaPrepared):
    """A word from each."""

    def taken(self, peer: int) -> int:
        return 0

    def steps(
        self, channel: Channel, before: int, base: int, inputs: Sequence[Array], outputs: Sequence[Array] | None
    ) -> Steps:
        line, done, digest = channel.line, base | 1, self._digest
        in_doubt = False
        if channel.signed != digest or not channel.is_free(before):
            yield from channel.enter(before)
            in_doubt = self.sign(channel)
        line[STAGED] = done
        for other in channel.others:
            while other[STAGED] < done:
                yield done
            if other[SIGNATURE] != digest:
                raise self.mismatch(channel, base)
        if in_doubt:
            channel.bank.settle()
        line[LEFT] = done
        return None
