"""Waiting: the clock that all waits use, deadlines, and the latch that ends all waits of a generation at once.

Nothing in the data plane sleeps, reads a clock or blocks directly. It asks a `Clock` for the time, for threads and for
`Parker`s to wait on. `SystemClock` gives real ones. The simulated world (`ferrorpc.testing`) gives virtual ones, where only the
thread that holds the baton runs, so that a seed replays an interleaving.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from ferrorpc.errors import FerroError, LimitExceededError, UsageError

FOREVER: Final = float("inf")


class Parker(Protocol):
    """A binary semaphore on which one thread waits. A permit that is given early is kept; several count as one."""

    def park(self, until: float) -> bool:
        """Waits for a permit, at most until clock time `until`. True when there was a permit, which is consumed."""

    def unpark(self) -> None:
        """Gives a permit. May be called from any thread, any number of times; never blocks."""


class Clock(Protocol):
    """Time in seconds from an arbitrary origin, threads, and parkers."""

    one_at_a_time: bool
    """Whether only one of its threads runs at a time, and yields only while it parks."""

    def now(self) -> float:
        """Monotonic seconds."""

    def parker(self) -> Parker:
        """A new parker."""

    def start(self, body: Callable[[], None], name: str) -> None:
        """Runs `body` on a daemon thread of its own. Raises LimitExceededError where the system refuses another thread."""

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Runs `action`, which must not block, at clock time `when` on a thread of the clock. Raises as `start`."""

    def give_way(self) -> None:
        """Lets other threads go first that can run now."""


class _SemaphoreParker:
    """A parker made of a lock, which is the cheapest wait with a timeout in CPython."""

    __slots__ = ("_guard", "_lock", "_permit")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._guard = threading.Lock()
        self._permit = False

    def park(self, until: float) -> bool:
        # Always with a timeout: CUDA sets Python's handler of SIGINT anew (SA_RESTART), and then Ctrl-C ends no other wait.
        remaining = until - time.monotonic()
        if not self._lock.acquire(timeout=min(max(remaining, 0.0), threading.TIMEOUT_MAX)):
            return False
        with self._guard:
            self._permit = False
        return True

    def unpark(self) -> None:
        with self._guard:
            if not self._permit:
                self._permit = True
                self._lock.release()


class SystemClock:
    """The real clock: time.monotonic, daemon threads, locks."""

    one_at_a_time = False
    now = staticmethod(time.monotonic)  # operations read it several times: no call of a method around it

    def parker(self) -> Parker:
        return _SemaphoreParker()

    def start(self, body: Callable[[], None], name: str) -> None:
        start_thread(threading.Thread(target=body, name=name, daemon=True))

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(max(0.0, when - time.monotonic()), action)
        timer.daemon = True
        start_thread(timer)

    def give_way(self) -> None:
        time.sleep(0)


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread. Raises LimitExceededError where the system refuses it."""
    with thread_needed(thread.name):
        thread.start()


@contextlib.contextmanager
def thread_needed(name: str) -> Iterator[None]:
    """Around what starts a thread, here or in gRPC. Raises LimitExceededError where the system or Python refuses it."""
    try:
        yield
    except RuntimeError as refusal:
        if "interpreter shutdown" in str(refusal):  # of Python 3.12 and later
            raise LimitExceededError(
                f"this process is ending, and Python starts no more threads in it ({name})",
                hint="end what needs ferrorpc, and close the group, before the main script ends, not in exit handlers",
            ) from None
        raise LimitExceededError(
            f"the system refuses a thread ({name}) beside the {threading.active_count()} of this process: {refusal}",
            hint="raise the limit of processes (`ulimit -u`, a container's pids limit) or, for threads' stacks, that of memory "
            "(`ulimit -v`, `-d`), or give the host fewer ranks",
        ) from None


SYSTEM_CLOCK: Final = SystemClock()


def _call_all(watchers: list[Callable[[], None]]) -> None:
    """Calls each; then raises the first error that one of them has raised."""
    failure: BaseException | None = None
    for watcher in watchers:
        try:
            watcher()
        except BaseException as error:  # noqa: BLE001  an interrupt, too: the others must hear of the end
            failure = failure or error
    if failure is not None:
        raise failure


class Latch:
    """The one-way switch of a generation: it trips once, keeps the first cause, and calls its watchers.

    Invariants: 1. `cause` never changes once set. 2. Each watcher is called exactly once, after `cause` is set; a watcher that
    is added later is called at once.

    Args:
        report: called with a cause that is to end the generation, and this latch; must not block. It sees to it that the latch
            trips once the first cause is known. None where no other rank has to know: the latch trips with the cause itself.

    Attributes:
        cause: the first cause; None while the generation is open.
        ended_here: what this rank has ended the generation with, where the first cause is perhaps not known yet: no operation
            begins or returns then. A latch and its parts share it.
        unhealthy: by world rank, a sentence about each member that the coordinator has reported as stalled or suspect, for the
            log messages of those who wait for it.
    """

    def __init__(self, report: Callable[[FerroError, Latch], None] | None = None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._watchers: dict[int, Callable[[], None]] = {}
        self._next = 0
        self.cause: FerroError | None = None
        self.ended_here: list[FerroError] = []
        self.unhealthy: dict[int, str] = {}

    def end(self, cause: FerroError) -> None:
        """Ends the generation with this cause, unless it has ended already. Returns at once; the latch may trip later."""
        if not self.ended_here:
            self.ended_here.append(cause.again())  # without its traceback, which would keep the arrays of the operation alive
        if self._report is None:
            self.trip(cause)
        else:
            self._report(cause, self)

    def trip(self, cause: FerroError) -> bool:
        """Sets the first cause and calls the watchers. False, and without effect, when it has tripped before.

        What a watcher raises, or an interrupt in it, is raised once all have been called.
        """
        with self._lock:
            if self.cause is not None:
                return False
            self.cause = cause
            watchers = list(self._watchers.values())
            self._watchers.clear()
        _call_all(watchers)
        return True

    def watch(self, watcher: Callable[[], None]) -> int:
        """Calls `watcher`, which must not block, when the latch trips. Returns a ticket for `forget`."""
        with self._lock:
            if self.cause is None:
                self._next += 1
                self._watchers[self._next] = watcher
                return self._next
        watcher()
        return 0

    def part(self) -> tuple[Latch, int]:
        """A latch that trips with this one, or before it, and the ticket with which this one forgets it, as it does by itself
        once nobody has the part any more."""
        part = Latch(lambda cause, part: self.end(cause))
        part.ended_here, part.unhealthy = self.ended_here, self.unhealthy

        def gone(_: object) -> None:
            self._watchers.pop(ticket, None)  # without the lock, which the thread that collects garbage may hold

        reference = weakref.ref(part, gone)

        def follow() -> None:
            part = reference()
            if part is not None and self.cause is not None:
                part.trip(self.cause)

        ticket = self.watch(follow)
        return part, ticket

    def forget(self, ticket: int) -> None:
        """Removes a watcher."""
        with self._lock:
            self._watchers.pop(ticket, None)

    def check(self) -> None:
        """Raises a fresh copy of the first cause when the latch has tripped."""
        if self.cause is not None:
            raise self.cause.again()


def wake_nobody() -> None:
    """The `wake` of what its driver polls, and of what has no driver."""


def seconds_of(timeout: Any, default: float) -> float:
    """A timeout argument of a caller, in seconds. Raises UsageError."""
    if timeout is None:
        return default
    try:
        seconds = -1.0 if isinstance(timeout, bool) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(f"timeout={timeout!r} is no number of seconds", hint="pass 0 or more, or None for the default")
    return seconds


class Guard:
    """Limits one operation: by a deadline in clock seconds and by the latch of its generation."""

    __slots__ = ("clock", "deadline", "latch", "seconds", "started")

    def __init__(self, clock: Clock, latch: Latch, seconds: float) -> None:
        self.clock = clock
        self.latch = latch
        self.seconds = seconds
        self.started = clock.now()
        self.deadline = self.started + seconds

    @property
    def waited(self) -> float:
        """Seconds since the operation began."""
        return self.clock.now() - self.started
