"""A whole job in one call: `run_world(4, fn)` runs `fn(group)` on four ranks and returns what each of them returned.

By default the world is virtual: nothing sleeps, timeouts of minutes take milliseconds, and the seed replays the run. With
`clock=SYSTEM_CLOCK` the ranks are ordinary threads in real time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ferrorpc.backends.simulated import Lanes, SimulatedBackend
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.errors import FerroError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import Clock
from ferrorpc.testing.faults import FaultPlan, Kill, RankKilled
from ferrorpc.testing.virtual import VirtualClock

WALL_SECONDS: Final = 100.0
"""Real seconds after which a world that has not ended is a failure."""


class World:
    """The ranks of one simulated job, and what each of them did.

    Args:
        size: how many ranks.
        faults: what goes wrong.
        seed: fixes every interleaving and every delay.
        timeout: the groups' timeout, in seconds of the world's clock.
        min_size: an elastic job: `reform` goes on with so many; None waits for replacements.
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
        self.size = size
        self.clock: Clock = VirtualClock(seed) if clock is None else clock
        self.job = LocalWorld(size, clock=self.clock, min_size=min_size, timeout=timeout)
        self._faults = FaultPlan() if faults is None else faults
        self._lanes = Lanes(self.clock, faults, seed)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._ended = 0
        self._all_ended = threading.Event()
        self._outcomes: list[Any] = [None] * size
        self._failed: list[int] = []
        self._killed: dict[int, RankKilled] = {}
        self._operations = [0] * size

    def run(self, fn: Callable[[ProcessGroup], Any], *, return_exceptions: bool = False) -> list[Any]:
        """What `fn(group)` returned on every rank, in rank order. Once per world. Raises as `run_world`."""
        groups = [self._group(self.job.session(rank)) for rank in range(self.size)]
        self._arm_faults()
        bodies = [(f"rank {rank}", self._body(rank, group, fn)) for rank, group in enumerate(groups)]
        if isinstance(self.clock, VirtualClock):
            self.clock.run(bodies, WALL_SECONDS)
        else:
            for name, body in bodies:
                self.clock.start(body, name)
            if not self._all_ended.wait(WALL_SECONDS):
                raise FerroError(f"{self.size - self._ended} of {self.size} ranks still run after {WALL_SECONDS:g} s")
        if self._failed and not return_exceptions:
            raise self._first_cause()
        return self._outcomes

    def join(self, timeout: float) -> ProcessGroup:
        """A new member, from a thread of this world: its group, as soon as the others' `reform` has room for it."""
        return self._group(self.job.join(timeout))

    def _group(self, session: LocalSession) -> ProcessGroup:
        return ProcessGroup(SimulatedBackend(session, self._lanes, self._timeout), timeout=self._timeout)

    def _body(self, rank: int, group: ProcessGroup, fn: Callable[[ProcessGroup], Any]) -> Callable[[], None]:
        def body() -> None:
            try:
                with group:
                    try:
                        self._outcomes[rank] = fn(group)
                    except BaseException as error:
                        self._note_failure(rank, error)
                        raise
            except RankKilled:
                pass
            except Exception as error:  # noqa: BLE001  it is kept, and raised by run()
                if rank not in self._failed:
                    self._note_failure(rank, error)
            finally:
                self._end(rank)

        return body

    def _note_failure(self, rank: int, error: BaseException) -> None:
        """The order of failures tells the cause from its consequences, so it is kept before anybody is told."""
        with self._lock:
            self._outcomes[rank] = error
            if rank not in self._killed:
                self._failed.append(rank)

    def _end(self, rank: int) -> None:
        with self._lock:
            if rank in self._killed:
                self._outcomes[rank] = self._killed[rank]
            self._ended += 1
            if self._ended == self.size:
                self._all_ended.set()

    def _first_cause(self) -> BaseException:
        """The failure that came first; of those that say the same, the lowest rank's. The others are its notes."""
        first: BaseException = self._outcomes[self._failed[0]]
        alike = [rank for rank in self._failed if repr(self._outcomes[rank]) == repr(first)]
        chosen = min(alike)
        error: BaseException = self._outcomes[chosen]
        error.add_note(f"raised on rank {chosen} of {self.size}")
        for rank in sorted(self._failed):
            if rank != chosen:
                other = self._outcomes[rank]
                error.add_note(f"rank {rank}: {type(other).__name__}: {other}")
        return error

    def _arm_faults(self) -> None:
        for rank, end in self._faults.kills().items():
            self._arm_kill(rank, end)
        if self._faults.kill:
            self.job.on_note = self._count_operation
        for rank, pause in self._faults.pause.items():
            if not isinstance(self.clock, VirtualClock):
                raise UsageError("only ranks of a virtual world can be paused", hint="leave clock= away")
            self.clock.call_at(pause.at_seconds, partial(self.clock.pause, rank))
            self.clock.call_at(pause.at_seconds + pause.seconds, partial(self.clock.unpause, rank))

    def _arm_kill(self, rank: int, end: Kill) -> None:
        self.job.session(rank)  # refuses a rank that does not exist
        if end.at_seconds is not None:
            self.clock.call_at(self.clock.now() + end.at_seconds, lambda: self._kill(rank, end.reason))

    def _kill(self, rank: int, reason: str) -> None:
        if rank in self._killed:
            return
        self._killed[rank] = RankKilled(f"rank {rank}: {reason}")
        if isinstance(self.clock, VirtualClock):
            self.clock.interrupt(rank, self._killed[rank])
        self.job.kill(rank, reason)

    def _count_operation(self, rank: int) -> None:
        self._operations[rank] += 1
        end = self._faults.kills().get(rank)
        if end is not None and self._operations[rank] == end.at_operation:
            self._kill(rank, end.reason)
        if rank in self._killed:
            raise self._killed[rank]


def run_world(
    size: int,
    fn: Callable[[ProcessGroup], Any],
    *,
    faults: FaultPlan | None = None,
    seed: int = 0,
    timeout: float = 60.0,
    return_exceptions: bool = False,
    clock: Clock | None = None,
) -> list[Any]:
    """Runs `fn(group)` on every rank of a simulated world; returns what each returned, in rank order.

    A rank whose fn returns closes its group; one whose fn raises leaves with that error, and the others see PeerLostError.

    Args:
        size: how many ranks.
        fn: called on a thread of its own for each rank.
        faults: what goes wrong; a rank that the plan kills has a `RankKilled` as its result, and that is no failure.
        seed: fixes every interleaving and every delay: the same seed replays the same run.
        timeout: the group's timeout, in (virtual) seconds.
        return_exceptions: put what a rank raised in the list instead of raising it.
        clock: None for a virtual one; `ferrorpc.guard.SYSTEM_CLOCK` for real threads in real time.

    Raises:
        BaseException: the first failure of any rank, with the other ranks' as notes.
        FerroError: the world stopped: everybody waited for ever. The message says where.
    """
    world = World(size, faults=faults, seed=seed, timeout=timeout, clock=clock)
    return world.run(fn, return_exceptions=return_exceptions)
