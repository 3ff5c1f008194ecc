"""What the launcher decides: exits, signals and the passing of time go in, what to do comes out.

The workers of one launcher live and end together. The phases, and what leads from one to the next:

    RUNNING   --a worker fails-->           FAILING    the others have `grace_seconds` to raise their own error
    FAILING   --grace is over-->            STOPPING   SIGTERM to those left
    RUNNING, FAILING --a signal to stop-->  STOPPING   forwarded to all
    STOPPING  --`shutdown_seconds` are over, or a second signal-->  KILLING   SIGKILL to those left
    any       --all have ended-->           RUNNING again while restarts are left and nobody asked to stop, else DONE

A worker that was asked to end has ended when its whole process group has: what a shell has started may have something to save.
Bad configuration (exit code 64) is never tried again.

With `scope="worker"` a failure within the restart budget replaces that worker alone, for scripts that call
`group.reform()`; the others go on. Not once one of them has finished: it would find nobody to form a group with. In an
elastic world a failure stops nobody: the others are told by the coordinator and may go on with a smaller world.

No clock, process or signal is touched here: `now` is passed in, and the caller carries the actions out.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from ferrorpc.exit_codes import EXIT_CONFIG, EXIT_RETRY

FOREVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Signal:
    """Send this signal to these workers."""

    workers: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Exit:
    """How one worker ended."""

    worker: int
    returncode: int
    at: float
    victim: bool
    """It ended because another member was lost."""
    stopped: bool
    """The launcher had asked it to end."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start these workers; `attempt` counts the restarts so far."""

    workers: tuple[int, ...]
    attempt: int
    cause: Exit | None = field(default=None, compare=False)
    """For people: whose end a restart follows from."""


@dataclass(frozen=True, slots=True)
class Done:
    """All have ended for good."""


Action = Signal | Start | Done


class Phase(Enum):
    """See the table above."""

    RUNNING = auto()
    FAILING = auto()
    STOPPING = auto()
    KILLING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Policy:
    """What the flags say about failures."""

    max_restarts: int = 0
    scope: str = "gang"
    """ "gang": a restart restarts all workers of this launcher; "worker": only the one that failed."""
    grace_seconds: float = 5.0
    shutdown_seconds: float = 30.0
    elastic: bool = False
    interrupt_number: int = signal.SIGINT
    """The signal that workers get for SIGINT; SIGTERM ends Python without a traceback."""


@dataclass(slots=True)
class Gang:
    """The workers of one launcher, numbered from 0.

    Invariants: 1. a worker is in `alive` from Start to its exit; 2. `deadline` is finite exactly in FAILING and STOPPING;
    3. Done is returned once.
    """

    size: int
    policy: Policy
    phase: Phase = Phase.RUNNING
    deadline: float = FOREVER
    restarts: int = 0
    interrupted: int = 0
    """The signal the launcher was asked to stop with; 0 for none."""
    alive: set[int] = field(default_factory=set)
    exits: list[Exit] = field(default_factory=list)
    """Of the current attempt."""

    def begin(self) -> list[Action]:
        """The first start."""
        return [self._start(tuple(range(self.size)))]

    def exited(self, worker: int, returncode: int, *, victim: bool, now: float) -> list[Action]:
        """A worker has ended."""
        self.alive.discard(worker)
        stopped = self.phase in (Phase.STOPPING, Phase.KILLING)
        end = Exit(worker, returncode, now, victim=victim or returncode == EXIT_RETRY, stopped=stopped)
        if returncode not in (0, EXIT_CONFIG) and self.phase is Phase.RUNNING and self._replaces_one():
            self.restarts += 1
            return [self._start((worker,), end)]
        self.exits.append(end)
        if not self.alive:
            return self._all_ended()
        if returncode != 0 and self.phase is Phase.RUNNING and not self.policy.elastic:
            self.phase, self.deadline = Phase.FAILING, now + self.policy.grace_seconds
        return []

    def signalled(self, number: int, now: float) -> list[Action]:
        """Someone asked the launcher to stop."""
        if self.interrupted:
            return self._kill()
        self.interrupted = number
        return self._stop(self.policy.interrupt_number if number == signal.SIGINT else number, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if now < self.deadline:
            return []
        return self._stop(signal.SIGTERM, now) if self.phase is Phase.FAILING else self._kill()

    @property
    def first_failure(self) -> Exit | None:
        """The exit that explains the others: the earliest that neither follows from a lost member nor from the launcher's
        own signal, where there is one."""
        failures = [end for end in self.exits if end.returncode != 0]
        if self.policy.elastic and self._has_begun_to_finish:
            return None  # the world went on without the failed ones, and finished
        return min(failures, key=lambda end: (end.stopped, end.victim, end.at), default=None)

    @property
    def _has_begun_to_finish(self) -> bool:
        return any(end.returncode == 0 for end in self.exits)

    def _replaces_one(self) -> bool:
        return self.policy.scope == "worker" and self.restarts < self.policy.max_restarts and not self._has_begun_to_finish

    def _start(self, workers: tuple[int, ...], cause: Exit | None = None) -> Start:
        self.alive.update(workers)
        return Start(workers, self.restarts, cause)

    def _stop(self, number: int, now: float) -> list[Action]:
        if not self.alive:
            return []
        self.phase, self.deadline = Phase.STOPPING, now + self.policy.shutdown_seconds
        return [Signal(tuple(sorted(self.alive)), number)]

    def _kill(self) -> list[Action]:
        self.phase, self.deadline = Phase.KILLING, FOREVER
        return [Signal(tuple(sorted(self.alive)), signal.SIGKILL)] if self.alive else []

    def _all_ended(self) -> list[Action]:
        self.deadline = FOREVER
        hopeless = any(end.returncode == EXIT_CONFIG for end in self.exits)
        first = self.first_failure
        again = first is not None and self.restarts < self.policy.max_restarts and not self.interrupted
        if hopeless or not again:
            self.phase = Phase.DONE
            return [Done()]
        self.phase = Phase.RUNNING
        self.restarts += 1
        self.exits.clear()
        return [self._start(tuple(range(self.size)), first)]
