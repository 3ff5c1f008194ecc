"""Adds what a lossy hook left out of one step to the next.

Idea. Each rank keeps, for every bucket, the difference between its values and what was delivered of them, and adds it to the
next gradients. So everything is delivered eventually, and biased compressors converge.

Source. Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.

Cost: memory of one float32 per value, and five passes over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from ferrorpc.ddp.bucket import between
from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.ddp.hooks.base import Exchange, Hook, Part, check_hook, check_state, run_exchange
from ferrorpc.ddp.hooks.residues import Residues
from ferrorpc.ddp.hooks.vector_ops import vector_ops_for
from ferrorpc.operations.stream import Stream

_PREFIX: Final = "residue/"
_HOOK: Final = "hook/"
"""The prefix of the state of the hook, which may have residues as well."""
_WEIGHT_MIN: Final = 2.0**-126
"""The least weight whose inverse float32 has."""


class ErrorFeedback(Hook):
    """Any hook, with what it left out added to the next step's values.

    Residues are of a rank's gradients: they count with its weight in the step that delivers them, and wait while that
    is 0. A bucket whose sum is not finite leaves no residue on any rank, so that an overflow does not affect later steps. If a
    step is interrupted, as when a member dies, buckets that were exchanged before count as delivered, although no optimizer
    gets their means, and all values of the others are added to the next step. To repeat such a step, load the `state()` from
    before it, or these count twice. The residue of a parameter waits for a step in which this rank uses it: if no rank does,
    its sum is dropped. For the same reason nothing waits of a gradient from before of a parameter that this rank does not use
    now: what the hook leaves out of it is lost. What `Compress` leaves out of a mean, which it rounds as well, waits on the
    rank that added up, and is added to the next mean, whatever that rank's weight then. Where a module is wrapped again, the
    residues of buckets that do not come again with the same parameters are dropped, too.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = check_hook(hook)
        self.operations = hook.operations
        self.on_device = hook.on_device
        self._residues = Residues()

    def serve(self, stream: Stream, keys: Iterable[str]) -> None:
        self._hook.serve(stream, keys)  # which may refuse
        super().serve(stream, keys)
        self._residues.kept = self._current(self._residues.kept)

    @property
    def text(self) -> str:
        return f"error feedback({self._hook.text})"

    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        inner = replace(part, wants_delivered=True, residues=self._residues)
        if not _WEIGHT_MIN <= part.weight < math.inf:  # hardly anything of this rank is in the mean, or there is none
            return (yield from run_exchange(self._hook, inner, collectives))
        ops = vector_ops_for(part.values)
        residue = self._residues.of(part.key, part.values.size, ops, part.weight)
        # All is delivered, sooner or later: an outer hook must not remember it as well.
        given = part.values.copy() if part.wants_delivered else None
        for start, stop in between(part.unused, 0, part.values.size):
            ops.add(part.values[start:stop], residue[start:stop])
            ops.assign(residue[start:stop], part.values[start:stop])
        delivered = yield from run_exchange(self._hook, inner, collectives)  # where this ends if the step fails
        waiting = [(residue[start:stop], residue[start:stop].copy()) for start, stop in part.unused]
        ops.subtract_delivered(residue, delivered)
        ops.forget_unless_finite(residue, part.values)
        for place, kept in waiting:
            ops.assign(place, kept)
        return given

    def state(self) -> dict[str, Array]:
        residues = {_PREFIX + key: residue for key, residue in self._residues.state().items()}
        return residues | {_HOOK + name: array for name, array in self._hook.state().items()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        check_state(state)
        own = {name for name in state if name.startswith(_PREFIX)}
        self._hook.load_state({name.removeprefix(_HOOK): array for name, array in state.items() if name not in own})
        self._residues.load(self._current({name.removeprefix(_PREFIX): state[name] for name in own}))
