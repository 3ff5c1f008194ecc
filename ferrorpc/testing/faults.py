"""Fault plans: slow messages, ranks that die, and ranks that pause, in a simulated world."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ferrorpc.errors import ConfigError
from ferrorpc.testing.virtual_clock import ThreadExit
from ferrorpc.types import integer_of


class RankKilled(ThreadExit):
    """Raised in a killed rank, to unwind its code. `run_world` puts it in the list of results."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kills a rank at a time, or as it enters its n-th group operation (counted from 1), whichever comes first."""

    at_seconds: float | None = None
    at_operation: int | None = None
    reason: str = "killed by the fault plan"

    def __post_init__(self) -> None:
        if self.at_seconds is None and self.at_operation is None:
            raise ConfigError("a Kill needs at_seconds or at_operation", hint="give one of them, such as Kill(at_seconds=2.5)")
        if self.at_seconds is not None:
            _check_seconds(self.at_seconds, "at_seconds")
        if self.at_operation is not None and integer_of(self.at_operation) < 1:
            raise ConfigError(f"at_operation={self.at_operation!r}: operations are counted from 1", hint="give 1 or more")


@dataclass(frozen=True, slots=True)
class Pause:
    """Pauses a rank's thread for a while, as a long computation does. Its asynchronous operations go on, and unlike a process
    that SIGSTOP has stopped it is declared neither stalled nor dead, because a simulated world has no heartbeats."""

    at_seconds: float
    seconds: float

    def __post_init__(self) -> None:
        _check_seconds(self.at_seconds, "at_seconds")
        _check_seconds(self.seconds, "seconds")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults of one world. The same plan and seed give the same run.

    A rank is here the one that a member has at the start: the plan holds for that member when `reform` gives it another, and
    for no replacement.

    Attributes:
        delay_seconds: every message takes a time drawn from [low, high]. Messages between the same two ranks stay in order.
        kill: rank -> how it is killed; a number means that many seconds after the start.
        pause: rank -> when it pauses. Only in virtual time.
    """

    delay_seconds: tuple[float, float] = (0.0, 0.0)
    kill: Mapping[int, Kill | float] = field(default_factory=dict)
    pause: Mapping[int, Pause] = field(default_factory=dict)

    def __post_init__(self) -> None:
        match self.delay_seconds:
            case (low, high) if _is_seconds(low) and _is_seconds(high) and low <= high:
                pass
            case wrong:
                raise ConfigError(f"delay_seconds={wrong!r} is no range of seconds", hint="give (low, high), 0 <= low <= high")
        _check_ranks("kill", self.kill, object, "a Kill, or a number of seconds")
        _check_ranks("pause", self.pause, Pause, "a Pause")
        self.kills()  # raises if one could never happen

    def delay(self, random: random.Random, source: int, target: int) -> float:
        """Seconds a message takes from `source` to `target`, which are ranks of the generation that it belongs to."""
        low, high = map(float, self.delay_seconds)
        return random.uniform(low, high)

    def kills(self) -> dict[int, Kill]:
        """`kill`, with numbers as `Kill`."""
        return {rank: end if isinstance(end, Kill) else Kill(at_seconds=end) for rank, end in self.kill.items()}


def _check_ranks(name: str, faults: object, kind: Any, expected: str) -> None:
    if not isinstance(faults, Mapping) or not all(integer_of(rank) >= 0 and isinstance(faults[rank], kind) for rank in faults):
        raise ConfigError(f"{name}={faults!r} is no plan for ranks", hint=f"give a dict: rank -> {expected}")


def _is_seconds(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


def _check_seconds(value: object, name: str) -> None:
    if not _is_seconds(value):
        raise ConfigError(f"{name}={value!r} is no number of seconds", hint="give 0 or more")
