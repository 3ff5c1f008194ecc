"""The launcher's state machine: takes exits, signals and the time, and returns the actions to carry out.

By default the workers of one launcher start and end together. The phases, and what leads from one to the next:

    RUNNING   --a worker fails-->           FAILING    the others have `grace_seconds` to end by themselves
    FAILING   --grace is over-->            STOPPING   SIGTERM to those left
    RUNNING, FAILING --a stop signal-->     STOPPING   the signal is forwarded to all
    STOPPING  --`shutdown_seconds` are over, or a second stop signal-->  KILLING   SIGKILL to those left
    any       --all have ended-->           RUNNING again while restarts are left and no stop was requested, else DONE

A job that cannot go on for another reason than its workers (`give_up`) is stopped as after the grace, and not restarted.

A worker that was told to stop counts as ended when its whole process group has ended: a shell may exit at once while the
program that it started still saves something. Bad configuration (exit code 64) is never retried.

With `scope="worker"` a failure within the restart budget restarts only that worker, for scripts that call `group.reform()`;
the others go on. Once another worker has finished, this no longer applies: the new worker could not form a full group. In an
elastic world a failure that is followed by no restart stops nobody: the coordinator tells the others, which may go on with a
smaller world. Nor are they stopped once one of them has finished. Such a world has finished, without those that failed, if the
last of its workers to end succeeded; one that ended well before the others failed has only left it. Who was outside the world
at its end, such as a replacement that came too late, does not count.

This module uses no clock, process or signal: `now` is passed in, and the caller carries the actions out.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from ferrorpc.exit_codes import EXIT_CONFIG

NO_DEADLINE: Final = float("inf")
REPEAT_SECONDS: Final = 1.0
"""Stop signals this soon after the first are taken for the same event, such as a terminal's end, of which a shell and the
kernel tell, or a batch system's SIGTERM, which a script passes on. A second Ctrl-C is none."""


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
    victim: bool
    """Whether it ended because another member or the coordinator was lost."""
    outside: bool
    """Whether it ended because it was not, or no longer, in the newest generation."""
    stopped: bool
    """Whether the launcher had told it to stop."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start these workers; `attempt` counts the restarts so far."""

    workers: tuple[int, ...]
    attempt: int
    cause: Exit | None = field(default=None, compare=False)
    """The exit that caused a restart, for the message about it."""


@dataclass(frozen=True, slots=True)
class Done:
    """All workers have ended and none is restarted."""


Action = Signal | Start | Done


class Phase(Enum):
    """See the table in the module docstring."""

    RUNNING = auto()
    FAILING = auto()
    STOPPING = auto()
    KILLING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """How failures are handled, from the flags of `ferrorpc run`."""

    max_restarts: int = 0
    scope: str = "gang"
    """ "gang": a restart restarts all workers of this launcher; "worker": only the failed one."""
    grace_seconds: float = 5.0
    shutdown_seconds: float = 30.0
    interrupt_number: int = signal.SIGINT
    """The signal that workers get for SIGINT. SIGTERM instead ends Python without a traceback."""


@dataclass(slots=True)
class WorkerGroup:
    """The workers of one launcher, numbered from 0.

    Invariants: 1. A worker is in `alive` from its Start to its exit. 2. `deadline` is finite only in FAILING and STOPPING.
    3. Done is returned once.
    """

    size: int
    policy: FailurePolicy
    phase: Phase = Phase.RUNNING
    deadline: float = NO_DEADLINE
    restarts: int = 0
    interrupted: int = 0
    """The stop signal that the launcher received; 0 for none."""
    interrupted_at: float = 0.0
    given_up: int = 0
    """The exit code of a job that `give_up` has ended; 0 for any other."""
    alive: set[int] = field(default_factory=set)
    exits: list[Exit] = field(default_factory=list)
    """Exits of the current attempt, the earliest first."""
    elastic: bool = False
    """Whether the world may lose some of its members and go on."""

    def begin(self) -> list[Action]:
        """The first start."""
        return [self._start(tuple(range(self.size)))]

    def exited(self, worker: int, returncode: int, *, victim: bool, outside: bool, now: float) -> list[Action]:
        """A worker has ended."""
        self.alive.discard(worker)
        stopped = self.phase in (Phase.STOPPING, Phase.KILLING)
        end = Exit(worker, returncode, victim, outside, stopped)
        restarts = returncode not in (0, EXIT_CONFIG) and self._may_restart
        if restarts and self.phase is Phase.RUNNING and self.policy.scope == "worker":
            self.restarts += 1
            return [self._start((worker,), end)]
        self.exits.append(end)
        if not self.alive:
            return self._all_ended()
        if returncode != 0 and self.phase is Phase.RUNNING and (restarts or not self.elastic):
            self.phase, self.deadline = Phase.FAILING, now + self.policy.grace_seconds
        elif self.phase is Phase.FAILING and self.elastic and self._any_succeeded:
            self.phase, self.deadline = Phase.RUNNING, NO_DEADLINE
        return []

    def signalled(self, number: int, now: float) -> list[Action]:
        """The launcher received a stop signal."""
        if self.interrupted:
            repeats = number != signal.SIGINT and now < self.interrupted_at + REPEAT_SECONDS
            return [] if repeats else self._kill()
        self.interrupted, self.interrupted_at = number, now
        return self._stop(self.policy.interrupt_number if number == signal.SIGINT else number, now)

    def give_up(self, code: int, now: float) -> list[Action]:
        """The job lacks what all of its workers need; `code` says so to whoever started it."""
        self.given_up = code
        return [] if self.phase in (Phase.STOPPING, Phase.KILLING) else self._stop(signal.SIGTERM, now)

    def tick(self, now: float) -> list[Action]:
        """Checks the deadline."""
        if now < self.deadline:
            return []
        return self._stop(signal.SIGTERM, now) if self.phase is Phase.FAILING else self._kill()

    @property
    def first_failure(self) -> Exit | None:
        """The failure that explains the others: preferably the earliest that was caused neither by a lost member nor by the
        launcher's own signal."""
        failures = [end for end in self.exits if end.returncode != 0]
        members = [end for end in self.exits if not end.outside]
        if self.elastic and members and members[-1].returncode == 0 and not members[-1].stopped:
            return None  # the world finished without the failed workers
        return min(failures, key=lambda end: (end.stopped, end.victim), default=None)

    @property
    def _any_succeeded(self) -> bool:
        return any(end.returncode == 0 and not end.stopped for end in self.exits)

    @property
    def _may_restart(self) -> bool:
        """Whether restarts are left, and no worker has finished."""
        return self.restarts < self.policy.max_restarts and not self._any_succeeded

    def _start(self, workers: tuple[int, ...], cause: Exit | None = None) -> Start:
        self.alive.update(workers)
        return Start(workers, self.restarts, cause)

    def _stop(self, number: int, now: float) -> list[Action]:
        if not self.alive:
            return []
        self.phase, self.deadline = Phase.STOPPING, now + self.policy.shutdown_seconds
        return [Signal(tuple(sorted(self.alive)), number)]

    def _kill(self) -> list[Action]:
        self.phase, self.deadline = Phase.KILLING, NO_DEADLINE
        return [Signal(tuple(sorted(self.alive)), signal.SIGKILL)] if self.alive else []

    def _all_ended(self) -> list[Action]:
        self.deadline = NO_DEADLINE
        misconfigured = any(end.returncode == EXIT_CONFIG for end in self.exits)
        first = self.first_failure
        again = first is not None and self.restarts < self.policy.max_restarts and not (self.interrupted or self.given_up)
        if misconfigured or not again:
            self.phase = Phase.DONE
            return [Done()]
        self.phase = Phase.RUNNING
        self.restarts += 1
        self.exits.clear()
        return [self._start(tuple(range(self.size)), first)]
