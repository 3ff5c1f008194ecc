"""The launcher's one loop: waits for output, exits, signals and deadlines, and carries out what the gang decides.

Everything happens on the main thread, because the death signal of a child (shim.py) follows the thread that started it,
and because a process without threads can start children at any time.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from ferrorpc.cli.launcher.child import Child, Nursery, living_groups
from ferrorpc.cli.launcher.coordinator import OwnCoordinator
from ferrorpc.cli.launcher.environment import worker_environment
from ferrorpc.cli.launcher.exit_reports import ExitReports
from ferrorpc.cli.launcher.gang import FOREVER, Action, Done, Exit, Gang, Phase, Signal, Start
from ferrorpc.cli.launcher.outcome import crash_report, final_code, is_victim, losses_line, reason, restart_line
from ferrorpc.cli.launcher.output import Console, WorkerStream
from ferrorpc.cli.launcher.pipes import Pipes
from ferrorpc.cli.launcher.plan import Plan
from ferrorpc.cli.launcher.signals import STOPS, SignalInbox, describe
from ferrorpc.cli.system import own_command
from ferrorpc.config import LAUNCH_VARIABLE
from ferrorpc.errors import ConfigError
from ferrorpc.exit_codes import EXIT_CONFIG, EXIT_PIPE, EXIT_RETRY

_WARM_UP_SECONDS: Final = 2.0
"""A job that lives this long gets its reporter started before there is anything to report, and is told of how to watch it."""
_GROUP_SECONDS: Final = 0.05
"""Between two looks whether a group has ended."""
_ANSWER_SECONDS: Final = 1.0
"""How long a restart waits for the coordinator to know of the exit, so that the successor finds its name free; and how
long the end of the launcher waits for it."""


class Worker:
    """One worker: its process, and its two streams."""

    def __init__(
        self, child: Child, launch: str, out: WorkerStream, err: WorkerStream, log: IO[bytes] | None, log_path: str | None
    ) -> None:
        self.child = child
        self.launch = launch
        self.out = out
        self.err = err
        self.log = log
        self.log_path = log_path
        self.seen_exit = False


def launch(plan: Plan, console: Console, environment: Mapping[str, str]) -> int:
    """Runs a plan from its first process to its last. Returns the exit code.

    Raises:
        ConfigError: the machine gives too few processes or descriptors, or no temporary directory.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="ferrorpc-"))
    except OSError as error:
        raise ConfigError(
            f"no temporary directory can be made: {error.strerror}", hint="set TMPDIR to a directory that can be written in"
        ) from None
    with SignalInbox(console.hurry) as inbox, Nursery([directory]) as nursery:
        try:
            return _Launch(plan, console, environment, inbox, nursery, directory).run()
        except BrokenPipeError:
            return EXIT_PIPE  # nobody reads the console any more: end as any filter does


class _Launch:
    """One launch.

    Args:
        directory: temporary; the nursery removes it.
    """

    def __init__(
        self,
        plan: Plan,
        console: Console,
        environment: Mapping[str, str],
        inbox: SignalInbox,
        nursery: Nursery,
        directory: Path,
    ) -> None:
        self._plan = plan
        self._console = console
        self._environment = environment
        self._inbox = inbox
        self._nursery = nursery
        self._directory = directory
        self._gang = Gang(plan.processes, plan.policy)
        self._labels = [plan.label(worker) for worker in range(plan.processes)]
        self._pipes = Pipes()
        self._reports = ExitReports(nursery, plan.coordinator, plan.job, self._environment)
        self._workers: dict[int, Worker] = {}
        self._coordinator: OwnCoordinator | None = None
        self._waiting: tuple[Start, float] | None = None
        """A restart and the latest time for it."""
        self._look_again_at = FOREVER
        """Finite while a worker has ended, and some of its group have not: the end of those is told to nobody."""
        self._code: int | None = None
        self._untold = plan.owns_coordinator and (console.attended or plan.http_port is not None)
        """Nobody can know the address of a coordinator that the launcher started, unless it says so to who asks or looks."""
        self._started = time.monotonic()

    def run(self) -> int:
        """Runs the job to its end. Returns the exit code."""
        self._pipes.call(self._inbox, self._on_signals)
        # Workers first: they need longer to reach their first call than the coordinator needs to listen.
        self._carry_out(self._gang.begin())
        if self._plan.owns_coordinator:
            journal = self._directory / "journal"
            self._coordinator = OwnCoordinator(
                self._nursery, self._plan.coordinator, journal, self._environment, self._plan.http_port
            )
            self._listen_to_coordinator(self._coordinator)
        while self._code is None:
            self._turn()
        self._deliver_reports()
        self._pipes.close()
        return self._code

    def _turn(self) -> None:
        """Waits for the next thing to happen and deals with everything that has."""
        now = time.monotonic()
        timeout = None if (until := self._next_deadline(now)) == FOREVER else max(0.0, until - now)
        self._pipes.wait(timeout)
        now = time.monotonic()
        self._carry_out(self._gang.tick(now))
        if now >= self._look_again_at:
            self._look_for_exits()
        self._look_after_coordinator(now)
        if self._cold and now >= self._started + _WARM_UP_SECONDS:
            self._warm_up()
        if self._waiting is not None and (now >= self._waiting[1] or not self._reports.outstanding):
            start, self._waiting = self._waiting[0], None
            self._spawn(start)

    def _next_deadline(self, now: float) -> float:
        deadlines = [self._gang.deadline, self._look_again_at]
        if self._coordinator is not None:
            deadlines.append(self._coordinator.deadline)
        if self._cold:
            deadlines.append(self._started + _WARM_UP_SECONDS)
        if self._waiting is not None:
            deadlines.append(self._waiting[1] if self._reports.outstanding else now)
        return min(deadlines)

    @property
    def _cold(self) -> bool:
        return self._reports.child is None or self._may_tell

    @property
    def _may_tell(self) -> bool:
        """Only a coordinator in service can be watched, and knows where its page is."""
        return self._untold and self._coordinator is not None and self._coordinator.has_listened

    def _warm_up(self) -> None:
        """What only a job is worth that lives a while."""
        if self._reports.child is None:
            self._start_reporter()
        if self._may_tell and self._coordinator is not None:
            self._untold = False
            if self._gang.interrupted:
                return
            where, job, page = self._plan.coordinator, self._plan.job, self._coordinator.page_address
            scheme = "https" if self._environment.get("FERRORPC_TLS_CERT") else "http"
            self._console.say(
                f"to watch this job: {own_command()} status --watch --coordinator {where} --job {job}"
                + (f", or {scheme}://{page}/" if page else "")
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
        """Starts workers, or lets them wait until the exits of their predecessors have been reported."""
        if self._waiting is not None:
            start = Start(self._waiting[0].workers + start.workers, start.attempt, self._waiting[0].cause)
        if self._reports.outstanding:
            self._waiting = (start, time.monotonic() + _ANSWER_SECONDS)
        else:
            self._waiting = None
            self._spawn(start)

    def _signal(self, worker: int, number: int) -> None:
        if worker in self._workers and not self._workers[worker].child.send(number):
            self._console.say(f"rank {self._labels[worker]} runs as another user and takes no {describe(-number)} from here")

    # -- workers ---------------------------------------------------------------------------------------------------------

    def _spawn(self, start: Start) -> None:
        if start.attempt:
            tail = [] if start.cause is None else self._workers[start.cause.worker].err.tail
            self._console.say(restart_line(start, self._plan.policy.max_restarts, self._labels, tail))
        for number in start.workers:
            if (before := self._workers.pop(number, None)) is not None:
                self._finish_output(before)
                self._nursery.discard(before.child)
            environment = worker_environment(self._plan, number, start.attempt, self._environment, self._directory)
            name = secrets.token_hex(4)
            child = self._nursery.start(self._plan.command, {**environment, LAUNCH_VARIABLE: name})
            self._workers[number] = self._connect(number, child, name, start.attempt)

    def _connect(self, number: int, child: Child, launch: str, attempt: int) -> Worker:
        log, path = self._open_log(number, attempt)
        prefix = self._console.prefix(self._labels[number], number)
        shown = self._plan.shown is None or number in self._plan.shown
        out = WorkerStream(self._console, 1, prefix, shown=shown, log=log)
        err = WorkerStream(self._console, 2, prefix, shown=shown, log=log)
        self._pipes.listen(child.stdout, out.feed)
        self._pipes.listen(child.stderr, err.feed)
        return Worker(child, launch, out, err, log, path)

    def _open_log(self, number: int, attempt: int) -> tuple[IO[bytes] | None, str | None]:
        if self._plan.log_dir is None:
            return None, None
        directory = self._plan.log_dir / self._plan.job / f"attempt{attempt}"
        directory.mkdir(parents=True, exist_ok=True)
        rank = self._plan.rank(number)
        path = directory / (f"rank{rank}.log" if rank is not None else f"{self._plan.name(number)}.log")
        return path.open("wb", buffering=0), str(path)

    def _finish_output(self, worker: Worker) -> None:
        self._pipes.finish(worker.child.stdout)
        self._pipes.finish(worker.child.stderr)
        if worker.log is not None:
            worker.log.close()

    # -- what happens ----------------------------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        for number in self._inbox.read():
            if number == signal.SIGCHLD:
                self._look_for_exits()
            elif number in STOPS:
                self._carry_out(self._gang.signalled(number, time.monotonic()))
                if self._waiting is not None:
                    self._abandon_restart()
            else:
                for worker in sorted(self._gang.alive):
                    self._signal(worker, number)

    def _abandon_restart(self) -> None:
        """The job is asked to end while a restart is on its way: those workers count as stopped."""
        assert self._waiting is not None
        start, self._waiting = self._waiting[0], None
        for number in start.workers:
            self._carry_out(self._gang.exited(number, -signal.SIGTERM, victim=False, now=time.monotonic()))

    def _look_for_exits(self) -> None:
        """Notes who has ended. Of those asked to, a shell goes at once, and what it runs may have something to save."""
        running = [(number, worker) for number, worker in self._workers.items() if not worker.seen_exit]
        ended = [(number, worker, code) for number, worker in running if (code := worker.child.poll()) is not None]
        groups = living_groups() if ended and self._gang.phase is Phase.STOPPING else frozenset()
        self._look_again_at = FOREVER
        for number, worker, returncode in ended:
            if worker.child.pid in groups:
                self._look_again_at = time.monotonic() + _GROUP_SECONDS
            else:
                worker.seen_exit = True
                self._on_exit(number, worker, returncode)

    def _on_exit(self, number: int, worker: Worker, returncode: int) -> None:
        self._pipes.drain(worker.child.stdout)
        self._pipes.drain(worker.child.stderr)
        now = time.monotonic()
        tail = worker.err.tail
        nobody_is_left = self._plan.owns_coordinator and self._gang.alive == {number}
        if not nobody_is_left:
            if self._reports.child is None:
                self._start_reporter()
            self._reports.send(self._plan.name(number), worker.launch, returncode, reason(returncode, tail))
        self._carry_out(self._gang.exited(number, returncode, victim=returncode > 0 and is_victim(tail), now=now))

    def _start_reporter(self) -> None:
        child = self._reports.start()
        self._pipes.listen(child.stdout, lambda data, now: self._reports.answered(data))
        self._pipes.listen(child.stderr, lambda data, now: None)

    def _listen_to_coordinator(self, coordinator: OwnCoordinator) -> None:
        stream = WorkerStream(self._console, 2, self._console.prefix("coordinator", 5), shown=True, log=None)
        self._pipes.listen(coordinator.child.stdout, lambda data, now: coordinator.announced(data))
        self._pipes.listen(coordinator.child.stderr, lambda data, now: self._hear_coordinator(stream, data, now))

    def _hear_coordinator(self, stream: WorkerStream, data: bytes, now: float) -> None:
        """Shows what it logs, until the job is asked to end: that its members then go is no news."""
        if not self._gang.interrupted:
            stream.feed(data, now)

    def _look_after_coordinator(self, now: float) -> None:
        coordinator = self._coordinator
        if coordinator is None or self._code is not None:
            return
        how = coordinator.check(now)
        if how is not None:
            self._pipes.drain(coordinator.child.stderr)
        if how is not None and coordinator.cannot_start:
            self._console.say(f"the coordinator cannot start on {self._plan.coordinator}: {how}")
            self._code = EXIT_CONFIG if coordinator.child.returncode == EXIT_CONFIG else EXIT_RETRY
        elif how is not None:
            self._console.say(f"the coordinator ended ({how}); it is started again on {self._plan.coordinator}")
        elif now >= coordinator.deadline:
            self._pipes.finish(coordinator.child.stdout)
            self._pipes.finish(coordinator.child.stderr)
            coordinator.restart()
            self._listen_to_coordinator(coordinator)

    def _deliver_reports(self) -> None:
        """Members on other nodes are to be told before this launcher, and its reporter with it, are gone."""
        until = time.monotonic() + _ANSWER_SECONDS
        while not self._plan.owns_coordinator and self._reports.outstanding and time.monotonic() < until:
            self._pipes.wait(until - time.monotonic())

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        for worker in self._workers.values():
            worker.child.send(signal.SIGKILL)  # what its own children left in the group
            self._finish_output(worker)
        self._console.close()
        first = self._gang.first_failure
        clean = all(end.returncode == 0 for end in self._gang.exits)
        self._code = final_code(first, self._gang.interrupted, clean=clean)
        if self._gang.interrupted:
            self._console.say(f"stopped by {describe(-self._gang.interrupted)}")
        elif first is not None:
            self._console.say(self._report(first))
        elif not clean:
            self._console.say(losses_line(self._gang.exits, self._labels))

    def _report(self, first: Exit) -> str:
        worker = self._workers[first.worker]
        others = [end for end in self._gang.exits if end is not first]
        return crash_report(first, others, self._labels, worker.err.tail, worker.log_path)
