"""How a thread waits for something that wakes nobody: words in shared memory, or a GPU.

Idea. Poll a few hundred times at once, because a peer in the same operation answers within microseconds. Then yield the
processor between polls, because the peer may need this very one. Then sleep, longer the longer the wait lasts, because by then
the peer is late. The first budget adapts: it halves when it was spent in vain and grows when it was enough. It is 0 where more
ranks than processors share the host.

Cost: about 0.1 us a poll, 0.5 us with yielding. Asleep, the added latency is a sixteenth of the time waited so far; over the
first 4 s of a barrier 2 % of a processor was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from ferrorpc.guard import SYSTEM_CLOCK

SPINS_MAX: Final = 400
SPINS_MIN: Final = 16
YIELDS: Final = 400
LOOKS: Final = 100
YIELD_SECONDS: Final = 10e-3
"""The time after which no further yield begins. On a busy processor one may take a tenth of a second, and until then nobody
looks at the latch and the deadline."""
NAP_SECONDS_MIN: Final = 50e-6
NAP_SECONDS_MAX: Final = 4e-3
NAP_SHARE: Final = 16
"""A sleep lasts the time waited so far, divided by this."""


class Polling:
    """Adaptive polling of shared memory for one rank.

    Args:
        ranks: how many ranks share this host.
    """

    def __init__(self, ranks: int) -> None:
        self.has_processor = ranks <= _processors()
        """Whether every rank can have a processor for itself, so that polling takes none from a peer."""
        self._spins_max = SPINS_MAX if self.has_processor else 0
        self._spins = self._spins_max

    def spin(self, steps: Iterable[object]) -> bool:
        """Takes a step with each poll until they end or the budget is spent. Returns whether they ended."""
        left = self._spins
        for _ in steps:
            left -= 1
            if left < 0:
                break
        else:
            if self._spins < self._spins_max:
                self._spins += 1
            return True
        if self._spins > SPINS_MIN:
            self._spins //= 2
        left, until = YIELDS, SYSTEM_CLOCK.now() + YIELD_SECONDS
        for _ in steps:
            left -= 1
            if left < 0 or SYSTEM_CLOCK.now() >= until:
                return False
            os.sched_yield()
        return True


class DevicePolling:
    """Polling of a GPU, at once only while the operation waits for the GPU. While it waits for messages, the threads that
    receive them need the interpreter, and wake the driver.

    Args:
        pending: whether the operation waits for the GPU.
    """

    def __init__(self, pending: Callable[[], bool]) -> None:
        self._pending = pending

    def spin(self, steps: Iterable[object]) -> bool:
        """As `Polling.spin`."""
        left, until = LOOKS, SYSTEM_CLOCK.now() + YIELD_SECONDS
        for _ in steps:
            left -= 1
            if left < 0 or SYSTEM_CLOCK.now() >= until or not self._pending():
                return False
            os.sched_yield()
        return True


def nap_seconds(waited_seconds: float, least_seconds: float = NAP_SECONDS_MIN) -> float:
    """How long to sleep before the next poll, after `waited_seconds` without progress."""
    return min(max(waited_seconds / NAP_SHARE, least_seconds), NAP_SECONDS_MAX)


def _processors() -> int:
    """How many processors this process may use; only Linux says that of a process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
