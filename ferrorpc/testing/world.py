"""Simulated worlds: `run_world(4, fn)` runs `fn(group)` on four ranks in this process, and returns what each returned.

By default time is virtual: nothing sleeps, timeouts of minutes take milliseconds, and the seed replays the run. With
`clock=SYSTEM_CLOCK` the ranks are ordinary threads in real time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, overload

from ferrorpc.backends.simulated import Networks, SimulatedBackend
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.errors import ConfigError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import Clock
from ferrorpc.testing.faults import FaultPlan, RankKilled
from ferrorpc.testing.rank_threads import RankThreads
from ferrorpc.testing.virtual_clock import VirtualClock

Returned = TypeVar("Returned")


class World:
    """The ranks of one simulated job.

    Args:
        size: how many ranks.
        faults: what goes wrong.
        seed: decides every interleaving and every delay.
        timeout: the groups' timeout, in seconds of the world's clock.
        min_size: makes the job elastic: `reform` goes on with so many ranks or more; None waits for replacements.
        clock: None for a new virtual one; `ferrorpc.guard.SYSTEM_CLOCK` for real time.
    """

    def __init__(
        self,
        size: int,
        *,
        faults: FaultPlan | None = None,
        seed: int = 0,
        timeout: float = 60.0,
        min_size: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = VirtualClock(seed) if clock is None else clock
        if not callable(getattr(self.clock, "parker", None)):
            raise ConfigError(f"clock={clock!r} is no clock", hint="leave it out for virtual time, or pass guard.SYSTEM_CLOCK")
        self.job = LocalWorld(size, clock=self.clock, min_size=min_size, timeout=timeout)
        self._plan = FaultPlan() if faults is None else faults
        if not isinstance(self._plan, FaultPlan):
            raise ConfigError(f"faults={faults!r} is no FaultPlan", hint="make one: FaultPlan(kill={1: 0.5})")
        self._kills = self._plan.kills()
        self._operations = dict.fromkeys(self._kills, 0)
        self._members = [self.job.session(rank) for rank in range(size)]
        """By rank of the start, which is the member's number, too. A later generation may give a member another rank."""
        self._lanes = Networks(self.clock, faults, seed)
        self._timeout = timeout
        self._ranks = RankThreads([self._group(member) for member in self._members], self.clock)
        self._arm_faults()

    @overload
    def run(
        self, fn: Callable[[ProcessGroup], Returned], *, return_exceptions: Literal[False] = ...
    ) -> list[Returned | RankKilled]: ...
    @overload
    def run(self, fn: Callable[[ProcessGroup], Returned], *, return_exceptions: bool) -> list[Returned | BaseException]: ...
    def run(self, fn: Callable[[ProcessGroup], Any], *, return_exceptions: bool = False) -> list[Any]:
        """Runs `fn(group)` on every rank; returns the results, by rank of the start. Only once. Raises as `run_world`."""
        return self._ranks.run(fn, return_exceptions)

    def join(self, timeout: float) -> ProcessGroup:
        """Joins as a new member, from a thread of this world. Returns its group once the others' `reform` lets it in."""
        return self._group(self.job.join(timeout))

    def _group(self, session: LocalSession) -> ProcessGroup:
        return ProcessGroup(SimulatedBackend(session, self._lanes, self._timeout), timeout=self._timeout)

    def _arm_faults(self) -> None:
        for rank, end in self._kills.items():
            self.job.session(rank)  # raises if there is no such rank
            self.job.on_operation = self._count_operation
            if end.at_seconds is not None:
                self.clock.call_at(self.clock.now() + float(end.at_seconds), partial(self._kill, rank, end.reason))
        for rank, pause in self._plan.pause.items():
            self.job.session(rank)
            if not isinstance(self.clock, VirtualClock):
                raise UsageError("only ranks of a virtual world can be paused", hint="omit clock=")
            begin = float(pause.at_seconds)
            self.clock.call_at(begin, partial(self.clock.pause, rank))
            self.clock.call_at(begin + float(pause.seconds), partial(self.clock.unpause, rank))

    def _kill(self, rank: int, reason: str) -> None:
        if rank in self._ranks.killed:
            return
        self._ranks.killed[rank] = RankKilled(f"rank {rank}: {reason}")
        if isinstance(self.clock, VirtualClock):
            self.clock.interrupt(rank, self._ranks.killed[rank])
        self._members[rank].die(reason)

    def _count_operation(self, rank: int) -> None:
        """Called when a member enters an operation, with its number. Kills it if its plan says so."""
        end = self._kills.get(rank)
        if end is None or rank in self._ranks.killed:
            return
        self._operations[rank] += 1
        if self._operations[rank] == end.at_operation:
            self._kill(rank, end.reason)
            raise self._ranks.killed[rank]


@overload
def run_world(
    size: int,
    fn: Callable[[ProcessGroup], Returned],
    faults: None = ...,
    seed: int = ...,
    *,
    timeout: float = ...,
    return_exceptions: Literal[False] = ...,
    clock: Clock | None = ...,
) -> list[Returned]: ...
@overload
def run_world(
    size: int,
    fn: Callable[[ProcessGroup], Returned],
    faults: FaultPlan,
    seed: int = ...,
    *,
    timeout: float = ...,
    return_exceptions: Literal[False] = ...,
    clock: Clock | None = ...,
) -> list[Returned | RankKilled]: ...
@overload
def run_world(
    size: int,
    fn: Callable[[ProcessGroup], Returned],
    faults: FaultPlan | None = ...,
    seed: int = ...,
    *,
    timeout: float = ...,
    return_exceptions: bool,
    clock: Clock | None = ...,
) -> list[Returned | BaseException]: ...
def run_world(
    size: int,
    fn: Callable[[ProcessGroup], Any],
    faults: FaultPlan | None = None,
    seed: int = 0,
    *,
    timeout: float = 60.0,
    return_exceptions: bool = False,
    clock: Clock | None = None,
) -> list[Any]:
    """Runs `fn(group)` on every rank of a simulated world; returns what each returned, in rank order.

    When fn returns, its group is closed. When fn raises, the rank leaves with that error, and the others get PeerLostError.

    Args:
        size: how many ranks.
        fn: called on a thread of its own for each rank.
        faults: what goes wrong. The result of a rank that the plan kills is a `RankKilled`, which does not count as a failure.
        seed: decides every interleaving and every delay: the same seed replays the same run.
        timeout: the group's timeout, in (virtual) seconds.
        return_exceptions: put what a rank raised in the list instead of raising it.
        clock: None for a virtual one; `ferrorpc.guard.SYSTEM_CLOCK` for real threads in real time.

    Raises:
        BaseException: the first failure of any rank, with those of other ranks as notes.
        FerroError: the world is deadlocked: all ranks wait for ever, or for a year. The message says where.
    """
    world = World(size, faults=faults, seed=seed, timeout=timeout, clock=clock)
    return world.run(fn, return_exceptions=return_exceptions)
