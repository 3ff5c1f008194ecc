"""What a lossy hook leaves out of one round is added to the next.

Idea. Each rank keeps, for every bucket, the difference between what it wanted to send and what was delivered, and adds it to
the next gradients. So every gradient arrives in the end, late instead of never, and biased compressors converge.

Source. Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.

Cost: one float32 for every value, and four passes over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ferrorpc.ddp.hooks.base import Exchange, Hook, Part, check_hook
from ferrorpc.ddp.hooks.values import HOST, Values, values_like
from ferrorpc.ddp.lane import Lane
from ferrorpc.ddp.memory import Array
from ferrorpc.errors import UsageError
from ferrorpc.operations.stream import Stream

_PREFIX = "residue/"


class ErrorFeedback(Hook):
    """Any hook, with what it left out added to the next round's values.

    A round with values that are not finite leaves no residue, so that one overflow does not spoil all that follows. Of a round
    that is broken off, as when a member dies, nothing was delivered: all of its values are added to the next. Who repeats that
    step loads the `state()` of before, or its gradients count twice.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = check_hook(hook)
        self.operations = hook.operations
        self.on_device = hook.on_device
        self._residues: dict[str, tuple[Values, Any]] = {}
        """Where the values are; those of `load_state` on the host until their bucket comes."""

    def serve(self, stream: Stream) -> None:
        super().serve(stream)
        self._hook.serve(stream)

    @property
    def text(self) -> str:
        return f"error feedback({self._hook.text})"

    def exchange(self, part: Part, lane: Lane) -> Exchange:
        place = values_like(part.values)
        if part.key not in self._residues:
            self._residues[part.key] = place, place.zeros(part.values.size)
        before, residue = self._residues[part.key]
        if residue.shape != part.values.shape:
            message = f"the residue of {part.key} has {residue.size} values for {part.values.size}"
            raise UsageError(message, hint="is it another model's?")
        if type(before) is not type(place):
            residue = place.taken(before.home(residue))
        self._residues[part.key] = place, residue
        place.add(part.values, residue)
        place.assign(residue, part.values)
        delivered = yield from self._hook.exchange(Part(part.key, part.values, part.matrices, True), lane)
        place.keep_rest(residue, delivered)
        return delivered

    def state(self) -> dict[str, Array]:
        residues = {_PREFIX + key: place.home(residue) for key, (place, residue) in self._residues.items()}
        return residues | self._hook.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        own = {name for name in state if name.startswith(_PREFIX)}
        self._hook.load_state({name: array for name, array in state.items() if name not in own})
        self._residues = {name.removeprefix(_PREFIX): (HOST, np.array(state[name], np.float32)) for name in own}
