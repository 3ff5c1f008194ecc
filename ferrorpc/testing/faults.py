"""What may go wrong in a simulated world, as a value: slow messages, ranks that die, ranks that stand still."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrorpc.errors import ConfigError
from ferrorpc.testing.virtual import Unwound


class RankKilled(Unwound):
    """What a killed rank's code sees: it unwinds. `run_world` puts it in the list of results."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a rank: at a time, or on entering its n-th group operation (counted from 1), whichever comes first."""

    at_seconds: float | None = None
    at_operation: int | None = None
    reason: str = "killed by the fault plan"

    def __post_init__(self) -> None:
        if self.at_seconds is None and self.at_operation is None:
            raise ConfigError("a Kill needs at_seconds or at_operation")


@dataclass(frozen=True, slots=True)
class Pause:
    """A rank's thread stands still for a while, as under SIGSTOP. Its asynchronous operations go on."""

    at_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults of one world. The same plan and seed give the same run.

    Attributes:
        delay_seconds: every message takes a time drawn from [low, high]; messages of one pair of ranks stay in order.
        kill: rank -> how it ends; a number means that many seconds after the start.
        pause: rank -> when it stands still. Virtual worlds only.
    """

    delay_seconds: tuple[float, float] = (0.0, 0.0)
    kill: Mapping[int, Kill | float] = field(default_factory=dict)
    pause: Mapping[int, Pause] = field(default_factory=dict)

    def __post_init__(self) -> None:
        low, high = self.delay_seconds
        if not 0 <= low <= high:
            raise ConfigError(f"delay_seconds={self.delay_seconds} is no range of seconds (low, high)")

    def delay(self, random: random.Random, source: int, target: int) -> float:
        """Seconds a message takes from rank `source` to rank `target`."""
        low, high = self.delay_seconds
        return random.uniform(low, high)

    def kills(self) -> dict[int, Kill]:
        """`kill` with every end spelled out."""
        return {rank: end if isinstance(end, Kill) else Kill(at_seconds=float(end)) for rank, end in self.kill.items()}
