"""The barrier in shared memory: no rank leaves before every rank has entered.

Idea. Each rank raises a word in its control block, and polls those of the others until all are raised.

Cost: p words read by each of p ranks, and no byte moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrorpc.collectives.arena.control_blocks import LEFT, SIGNATURE, STAGED, Array, Steps
from ferrorpc.collectives.arena.execution import Outcome
from ferrorpc.collectives.arena.prepared import ArenaPrepared, Claim


class Barrier(ArenaPrepared):
    """A word from each."""

    def taken(self, peer: int) -> int:
        return 0

    def steps(self, claim: Claim, inputs: Sequence[Array], outputs: Sequence[Array] | None, found: list[Outcome]) -> Steps:
        channel, before, base = claim
        block, done, digest = channel.block, base | 1, self._digest
        checks_pending = False
        if channel.signed != digest or not channel.is_free(before):
            yield from channel.enter(before)
            checks_pending = self.publish_signature(channel, base)
        block[STAGED] = done
        for other in channel.others:
            while other[STAGED] < done:
                yield done
            if other[SIGNATURE] != digest:
                raise self.mismatch(channel, base)
        if checks_pending:
            channel.bank.settle()
        block[LEFT] = done
        found.append(((), []))
