"""The launcher's event loop: waits for output, exits, signals and deadlines, and carries out what `WorkerGroup` decides.

Everything runs on the main thread: PR_SET_PDEATHSIG (exec_shim.py) applies to the thread that started the child, and a
process without other threads can start children at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ferrorpc.cli.launcher.child_processes import REFUSED_SECONDS, Child, ChildProcesses, living_groups
from ferrorpc.cli.launcher.coordinator_process import CoordinatorProcess
from ferrorpc.cli.launcher.environment import given_settings, worker_environment
from ferrorpc.cli.launcher.exit_reporter import ExitReporter
from ferrorpc.cli.launcher.exit_summary import (
    crash_report,
    exit_reason,
    is_outside,
    is_victim,
    launcher_exit_code,
    losses_line,
    restart_line,
    victims_line,
    waiting_line,
)
from ferrorpc.cli.launcher.output import Console, WorkerStream
from ferrorpc.cli.launcher.pipes import Pipes
from ferrorpc.cli.launcher.plan import Plan
from ferrorpc.cli.launcher.signals import STOP_SIGNALS, SignalInbox, describe
from ferrorpc.cli.launcher.worker_group import NO_DEADLINE, Action, Done, Phase, Signal, Start, WorkerGroup
from ferrorpc.cli.ports import held_ports
from ferrorpc.cli.system import own_command
from ferrorpc.config import GIVEN_VARIABLE, LAUNCH_VARIABLE
from ferrorpc.errors import ConfigError
from ferrorpc.exit_codes import EXIT_CONFIG, EXIT_PIPE, EXIT_RETRY

_WARM_UP_SECONDS: Final = 2.0
"""After this time the exit reporter is started, ahead of any report, and the user is told how to watch the job."""
_SPAWN_SECONDS: Final = 0.5
"""How long workers are started before signals and exits are looked at again: thousands take minutes."""
_EXPLAIN_SECONDS: Final = 5.0
"""After this time in one phase the user is told whom the launcher waits for."""
_GROUP_POLL_SECONDS: Final = 0.05
"""Between two checks whether a process group has ended."""
_READY_SECONDS: Final = 10.0
"""How long the launcher's end waits for the exit reporter to be ready, where it has a report to make."""
_ANSWER_SECONDS: Final = 1.0
"""How long a restart waits until the coordinator has confirmed the exit, so that the new worker finds its name free; and how
long the launcher's own exit waits for that."""


@dataclass(slots=True)
class Worker:
    """One worker: its process and its output.

    Attributes:
        launch: random ids of this run and this start, by which an exit report names the process.
    """

    child: Child
    launch: str
    err: WorkerStream
    log: IO[bytes] | None
    seen_exit: bool = False


def launch(plan: Plan, console: Console, environment: Mapping[str, str]) -> int:
    """Runs a plan to its end. Returns the exit code.

    Raises:
        ConfigError: too few processes or descriptors are available, there is no temporary directory, or a port that the plan
            chose has been taken since.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="ferrorpc-"))
    except OSError as error:
        raise ConfigError(
            f"no temporary directory can be made: {error.strerror}", hint="set TMPDIR to a directory that can be written in"
        ) from None
    with (
        SignalInbox(console.stop_waiting) as inbox,
        ChildProcesses([directory]) as children,
        held_ports(*plan.chosen_ports),
    ):
        try:
            return _Launch(plan, console, environment, inbox, children, directory).run()
        except BrokenPipeError:
            return EXIT_PIPE  # nobody reads the output any more: end as any filter does


def inheritable_stdin() -> int | None:
    """The standard input of a single worker, for subprocess: None to inherit the launcher's, else DEVNULL.

    A worker has its own session, so the kernel does not stop it (SIGTTIN) when it reads the terminal. A launcher in the
    background therefore passes no terminal on: its worker would take what the user types into the shell.
    """
    if sys.stdin is None:
        return subprocess.DEVNULL
    with contextlib.suppress(OSError):  # standard input is no terminal, or not this session's
        if os.tcgetpgrp(0) != os.getpgrp():
            return subprocess.DEVNULL
    return None


class _Launch:
    """One launch.

    Args:
        directory: temporary; `children` removes it.
    """

    def __init__(
        self,
        plan: Plan,
        console: Console,
        environment: Mapping[str, str],
        inbox: SignalInbox,
        children: ChildProcesses,
        directory: Path,
    ) -> None:
        self._plan = plan
        self._console = console
        self._environment = environment
        self._inbox = inbox
        self._children = children
        self._directory = directory
        self._group = WorkerGroup(plan.processes, plan.policy, elastic=plan.elastic)
        self._labels = [plan.label(worker) for worker in range(plan.processes)]
        self._pipes = Pipes()
        self._reporter = ExitReporter(children, plan.coordinator, plan.job, self._environment, console.say)
        self._run_id = secrets.token_hex(4)
        self._workers: dict[int, Worker] = {}
        self._coordinator: CoordinatorProcess | None = None
        self._to_start: deque[tuple[int, int]] = deque()
        """Workers that are still to be started, each with the number of restarts so far."""
        self._answer_by = 0.0
        """Until then they wait for answers to reports of their predecessors' exits."""
        self._refused_until = 0.0
        """No worker is started before that, as the system has refused one."""
        self._poll_groups_at = NO_DEADLINE
        """Finite while a worker has exited but not its whole group: no signal announces the end of the rest."""
        self._explained_phase = Phase.RUNNING
        self._explain_at = NO_DEADLINE
        """When the wait of that phase is to be explained; finite only until it was."""
        self._code: int | None = None
        self._is_hurried = False
        """A stop signal came when only reports were still to be delivered."""
        self._announce = plan.owns_coordinator and (console.on_terminal or plan.http_port is not None)
        """Whether the address of the launcher's own coordinator is still to be printed."""
        self._warm_up_at = time.monotonic() + _WARM_UP_SECONDS

    def run(self) -> int:
        """Runs the job to its end. Returns the exit code."""
        self._pipes.call(self._inbox.fileno(), self._on_signals)
        # Workers first: they take longer to reach their first call than the coordinator takes to listen.
        self._carry_out(self._group.begin())
        self._spawn()
        if self._plan.owns_coordinator:
            self._coordinator = CoordinatorProcess(
                self._children, self._plan.coordinator, self._directory / "journal", self._environment, self._plan.http_port
            )
            self._listen_to_coordinator(self._coordinator)
        while self._code is None:
            self._run_once()
        self._deliver_reports()
        self._pipes.close()
        return self._code

    def _run_once(self) -> None:
        """Waits for the next event or deadline and handles everything that is due."""
        now = time.monotonic()
        self._pipes.wait(self._next_deadline(now) - now)
        now = time.monotonic()
        self._carry_out(self._group.tick(now))
        if now >= self._poll_groups_at:
            self._check_exits()
        self._check_coordinator(now)
        if now >= self._warm_up_at:
            self._warm_up()
        if self._group.phase in (Phase.STOPPING, Phase.KILLING):
            self._abandon()
        elif now >= self._start_at:
            self._spawn()
        self._explain_wait(now)

    def _explain_wait(self, now: float) -> None:
        phase = self._group.phase
        if phase is not self._explained_phase:
            self._explained_phase = phase
            self._explain_at = NO_DEADLINE if phase in (Phase.RUNNING, Phase.DONE) else now + _EXPLAIN_SECONDS
        elif now >= self._explain_at:
            self._explain_at = NO_DEADLINE
            self._console.say(waiting_line(self._group, self._labels, now))

    def _next_deadline(self, now: float) -> float:
        deadlines = [self._group.deadline, self._poll_groups_at, self._explain_at]
        if self._coordinator is not None:
            deadlines.append(self._coordinator.restart_at)
        if now < self._warm_up_at:
            deadlines.append(self._warm_up_at)
        if self._to_start:
            deadlines.append(self._start_at)
        return min(deadlines)

    @property
    def _start_at(self) -> float:
        """When the next worker may be started."""
        return max(self._refused_until, self._answer_by if self._reporter.unanswered else 0.0)

    def _warm_up(self) -> None:
        """What is done only for a job that has run for _WARM_UP_SECONDS."""
        if not self._reporter.started:
            self._start_reporter()
        coordinator = self._coordinator  # only one in service can be watched and knows the address of its page
        if self._announce and not self._group.interrupted and coordinator is not None and coordinator.has_listened:
            self._announce = False
            page = coordinator.page_address
            words = ("status", "--watch", "--coordinator", self._plan.coordinator, "--job", self._plan.job)
            scheme = "https" if self._environment.get("FERRORPC_TLS_CERT") else "http"
            self._console.say(
                f"to watch this job: {own_command()} {shlex.join(words)}" + (f", or {scheme}://{page}/" if page else "")
            )

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Signal):
                for worker in action.workers:
                    self._signal(worker, action.number)
            elif isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Done):
                self._finish()

    def _start(self, start: Start) -> None:
        """Has workers started once the exits of their predecessors have been reported."""
        if start.cause is not None:
            tail = self._workers[start.cause.worker].err.tail
            self._console.say(restart_line(start, self._plan.policy.max_restarts, self._labels, tail))
        self._to_start.extend((worker, start.attempt) for worker in start.workers)
        self._answer_by = time.monotonic() + _ANSWER_SECONDS

    def _signal(self, worker: int, number: int) -> None:
        if worker in self._workers and not self._workers[worker].child.send(number):
            self._console.say(f"rank {self._labels[worker]} runs as another user and takes no {describe(-number)} from here")

    # -- workers ---------------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        """Starts what is to be started, for a while."""
        until = time.monotonic() + _SPAWN_SECONDS
        while self._to_start and (now := time.monotonic()) < until:
            number, attempt = self._to_start[0]
            if (before := self._workers.get(number)) is not None:
                self._finish_output(before)
                self._children.discard(before.child)
            environment = worker_environment(self._plan, number, attempt, self._environment, self._directory)
            name = f"{self._run_id}/{secrets.token_hex(4)}"
            stdin = inheritable_stdin() if self._plan.processes == 1 else subprocess.DEVNULL
            environment.update({LAUNCH_VARIABLE: name, GIVEN_VARIABLE: given_settings(environment)})
            try:
                child = self._children.start(self._plan.command, environment, stdin=stdin)
            except ConfigError as error:
                if not attempt or self._group.alive <= {left for left, _ in self._to_start}:  # nobody can wait for it
                    raise
                self._console.say(f"rank {self._labels[number]} is not started again yet: {error.message}")
                self._refused_until = now + REFUSED_SECONDS
                return
            self._to_start.popleft()
            self._workers[number] = self._connect(number, child, name, attempt)

    def _connect(self, number: int, child: Child, launch: str, attempt: int) -> Worker:
        log = self._open_log(number, attempt)
        prefix = self._console.prefix(self._labels[number], number)
        shown = self._plan.shown is None or number in self._plan.shown
        out = WorkerStream(self._console, 1, prefix, shown=shown, log=log)
        err = WorkerStream(self._console, 2, prefix, shown=shown, log=log)
        self._pipes.listen(child.stdout, out.feed)
        self._pipes.listen(child.stderr, err.feed)
        return Worker(child, launch, err, log)

    def _open_log(self, number: int, attempt: int) -> IO[bytes] | None:
        """A new file for a worker's output; one of an earlier launch gets a number behind its name.

        A restarted worker does without one if it cannot be made.
        """
        if self._plan.log_dir is None:
            return None
        directory = self._plan.log_dir / self._plan.job / f"attempt{attempt}"
        rank = self._plan.rank(number)
        path = directory / (f"rank{rank}.log" if rank is not None else f"{self._plan.name(number)}.log")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _set_aside(path)
            return path.open("wb", buffering=0)
        except OSError as error:
            if not attempt:
                raise
            self._console.say(f"{path} is not written: {error.strerror}")
            return None

    def _finish_output(self, worker: Worker) -> None:
        self._pipes.finish(worker.child.stdout, worker.child.stderr)
        if worker.log is not None:
            worker.log.close()

    # -- events ----------------------------------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        for number in self._inbox.read():
            if number == signal.SIGCHLD:
                self._check_exits()
            elif number in STOP_SIGNALS:
                self._is_hurried = self._code is not None
                self._carry_out(self._group.signalled(number, time.monotonic()))
            else:
                for worker in sorted(self._group.alive):
                    self._signal(worker, number)

    def _abandon(self) -> None:
        """The job stops before these workers were started: they count as stopped."""
        abandoned, self._to_start = self._to_start, deque()
        for number, _ in abandoned:
            self._carry_out(self._group.exited(number, -signal.SIGTERM, victim=False, outside=False, now=time.monotonic()))

    def _check_exits(self) -> None:
        """Detects exits. Once the workers were told to stop, one counts as ended only when its whole process group has."""
        running = [(number, worker) for number, worker in self._workers.items() if not worker.seen_exit]
        ended = [(number, worker, code) for number, worker in running if (code := worker.child.poll()) is not None]
        groups = living_groups() if ended and self._group.phase is Phase.STOPPING else frozenset()
        self._poll_groups_at = NO_DEADLINE
        for number, worker, returncode in sorted(ended, key=lambda each: each[2] == 0):  # which ended last is not known
            if worker.child.pid in groups:
                self._poll_groups_at = time.monotonic() + _GROUP_POLL_SECONDS
            else:
                worker.seen_exit = True
                self._on_exit(number, worker, returncode)

    def _on_exit(self, number: int, worker: Worker, returncode: int) -> None:
        self._pipes.drain(worker.child.stdout)
        self._pipes.drain(worker.child.stderr)
        now = time.monotonic()
        tail = worker.err.tail
        is_last = self._plan.owns_coordinator and self._group.alive == {number}
        if not is_last:
            if not self._reporter.runs:
                self._start_reporter()
            self._reporter.send(self._plan.name(number), worker.launch, returncode, exit_reason(returncode, tail))
        victim, outside = is_victim(returncode, tail), is_outside(returncode, tail)
        self._carry_out(self._group.exited(number, returncode, victim=victim, outside=outside, now=now))

    def _start_reporter(self) -> None:
        """Starts the process that reports exits, anew where it has ended."""
        if (before := self._reporter.child) is not None:
            self._pipes.finish(before.stdout, before.stderr)
        if (child := self._reporter.start()) is not None:
            words = WorkerStream(self._console, 2, self._console.prefix("exit reporter", 5))
            self._pipes.listen(child.stdout, lambda data, now: self._reporter.on_output(data))
            self._pipes.listen(child.stderr, words.feed)

    def _listen_to_coordinator(self, coordinator: CoordinatorProcess) -> None:
        stream = WorkerStream(self._console, 2, self._console.prefix("coordinator", 5))
        self._pipes.listen(coordinator.child.stdout, lambda data, now: coordinator.on_output(data))
        self._pipes.listen(coordinator.child.stderr, lambda data, now: self._on_coordinator_log(coordinator, stream, data, now))

    def _on_coordinator_log(self, coordinator: CoordinatorProcess, stream: WorkerStream, data: bytes, now: float) -> None:
        """Shows what it logs until the job is told to stop. That members leave after that is expected."""
        if coordinator.is_told and not self._group.interrupted:
            stream.feed(data, now)

    def _check_coordinator(self, now: float) -> None:
        coordinator = self._coordinator
        if coordinator is None or self._code is not None:
            return
        if coordinator.child.poll() is not None:
            self._pipes.drain(coordinator.child.stderr)  # `check` may begin to keep quiet
        exit_text = coordinator.check(now)
        if exit_text is not None and coordinator.cannot_start:
            self._console.say(f"the coordinator cannot start on {self._plan.coordinator}: {exit_text}")
            self._coordinator = None
            code = EXIT_CONFIG if coordinator.child.returncode == EXIT_CONFIG else EXIT_RETRY
            self._carry_out(self._group.give_up(code, now))
        elif exit_text is not None and coordinator.is_told:
            self._console.say(f"the coordinator ended ({exit_text}); it is started again on {self._plan.coordinator}")
        elif now >= coordinator.restart_at:
            self._pipes.finish(coordinator.child.stdout, coordinator.child.stderr)
            try:
                coordinator.restart(now)
            except ConfigError as error:  # the workers can do without for some time
                self._console.say(f"the coordinator is not started again yet: {error.message}")
            else:
                self._listen_to_coordinator(coordinator)

    def _deliver_reports(self) -> None:
        """Waits for pending exit reports: members on other nodes need them, and the reporter ends with the launcher. A stop
        signal ends that."""
        if self._plan.owns_coordinator:
            return
        until, was_ready = time.monotonic() + _READY_SECONDS, False
        while self._reporter.unanswered and not self._is_hurried and (now := time.monotonic()) < until:
            if self._reporter.ready and not was_ready:
                until, was_ready = now + _ANSWER_SECONDS, True
            self._pipes.wait(until - now)

    # -- end -------------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        for worker in self._workers.values():
            worker.child.send(signal.SIGKILL)  # processes that it left in its group
            self._finish_output(worker)
        self._console.close()
        first = self._group.first_failure
        clean = all(end.returncode == 0 for end in self._group.exits)
        self._code = launcher_exit_code(first, self._group.interrupted, self._group.given_up, clean=clean)
        if self._group.interrupted:
            self._console.say(f"stopped by {describe(-self._group.interrupted)}")
            killed = [end for end in self._group.exits if end.returncode == -signal.SIGKILL]
            if killed:  # perhaps while they saved
                self._console.say(victims_line(killed, self._labels))
        elif self._group.given_up:
            self._console.say(victims_line(self._group.exits, self._labels))
        elif first is not None:
            worker, others = self._workers[first.worker], [end for end in self._group.exits if end is not first]
            log = None if worker.log is None else worker.log.name
            self._console.say(crash_report(first, others, self._labels, worker.err.tail, log))
        elif not clean:
            self._console.say(losses_line(self._group.exits, self._labels))


def _set_aside(log: Path) -> None:
    """Renames the log of an earlier launch to the first free name with a number: what failed is still to be read."""
    if log.is_file():
        log.rename(next(name for number in itertools.count(1) if not (name := log.with_name(f"{log.name}.{number}")).exists()))
