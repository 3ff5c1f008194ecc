"""Virtual time, and threads of which exactly one runs at a time: a simulated world that replays from its seed.

The idea is a baton. A thread of the world runs only while it holds the baton, and gives it up only in `park`, the one place
where anything in the data plane waits. Which runnable thread gets it next is drawn from `random.Random(seed)`. When no thread
is runnable, time jumps to the next timer: the arrival of a message, or a deadline. So nothing really sleeps, virtual time costs
only what happens in it, and the same seed gives the same interleaving (equal `trace` values prove it).

Ordinary code runs unchanged. It may use locks, but must not hold one across a `park`. When no thread is runnable and no timer
is due within a year, the world is deadlocked: each main thread then gets an error that says where all of them wait.
"""

from __future__ import annotations

import heapq
import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

from ferrorpc.errors import FerroError, UsageError
from ferrorpc.guard import FOREVER, start_thread
from ferrorpc.transports.inproc import seed_of

WALL_SECONDS: Final = 300.0
"""How long `run` waits in real time. It takes that long if a thread blocks or spins outside `park`, or has much to compute."""
TURN_SECONDS: Final = 1e-4
"""What a call takes that asks for the present state, in a world whose other threads all wait."""
IDLE_SECONDS: Final = 365 * 86_400.0
"""A world whose next timer is farther off, in virtual time, counts as deadlocked: an operation without a deadline always has
another, because it explains its wait at ever longer intervals."""
LEAVING_SECONDS: Final = 5.0
"""How long, in real time, the next thread waits for one that has ended to free what it held, which may wait for the next."""
FRAMES_SHOWN: Final = 4


class ThreadExit(BaseException):
    """Raised in `park` to end a thread of the world. Nothing has to catch it, and it is not reported."""


class WorldEnded(ThreadExit):
    """All main threads have ended, so the helper threads end, too; or `run` was interrupted, so all threads end."""


class _Thread:
    """One thread of the world. Its `baton` lock is released when the thread is chosen to run."""

    __slots__ = ("baton", "epoch", "error", "fatal", "ident", "main", "name", "number", "parker", "paused", "withheld")

    def __init__(self, number: int, name: str, main: bool) -> None:
        self.number = number
        self.name = name
        self.main = main
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ident = 0
        self.parker: VirtualParker | None = None
        """What it waits on; None while it is runnable."""
        self.epoch = 0
        """Counts its waits, so that a timer of an earlier wait is recognised as stale."""
        self.error: BaseException | None = None
        """Raised once, by the current wait."""
        self.fatal: BaseException | None = None
        """Raised by the current wait and every later one."""
        self.paused = False
        self.withheld = False
        """Whether it would be runnable if it were not paused."""

    def __str__(self) -> str:
        return f"thread {self.name!r}"


class VirtualParker:
    """What a thread of a virtual world waits on."""

    __slots__ = ("_clock", "permit", "waiter")

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.permit = False
        self.waiter: _Thread | None = None

    def park(self, until: float) -> bool:
        """Waits for the permit, or until virtual time `until`. Other threads may run in any case. Returns as `Parker.park`."""
        self._clock.wait(self, until)
        permit, self.permit = self.permit, False
        return permit

    def unpark(self) -> None:
        """Gives the permit, and makes the thread that waits runnable."""
        self.permit = True
        waiter = self.waiter
        if waiter is not None:
            self._clock.resume(waiter)


class VirtualClock:
    """Virtual time, and the threads of one simulated world. A clock has one `run`.

    Args:
        seed: decides which of several runnable threads runs next.

    Attributes:
        trace: a hash of all switches: which thread, at what virtual time. Equal traces mean equal interleavings.
        switches: how many switches there were.
    """

    one_at_a_time = True

    def __init__(self, seed: int = 0) -> None:
        self.trace = 0
        self.switches = 0
        self._draw = random.Random(seed_of(seed)).random
        self._now = 0.0
        self._runnable: list[_Thread] = []
        self._timers: list[tuple[float, int, _Thread | None, int, Callable[[], None] | None]] = []
        self._timer_count = 0
        self._threads: dict[int, _Thread] = {}
        self._real_threads: list[threading.Thread] = []
        self._thread_count = 0
        self._first_body = 0
        """Number of the first main thread: helpers may have been started before it."""
        self._holder: _Thread | None = None
        self._leaving: threading.Thread | None = None
        """One that has ended and given the baton up, but may still free what it held."""
        self._main_count = 0
        self._failures: list[str] = []
        self._started = False
        self._over = False
        self._ended = threading.Event()

    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    def parker(self) -> VirtualParker:
        """A new parker, for threads of this world."""
        return VirtualParker(self)

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Runs `action` at virtual time `when`, after earlier actions for the same time. It must not park."""
        self._timer_count += 1
        heapq.heappush(self._timers, (max(when, self._now), self._timer_count, None, 0, action))

    def start(self, body: Callable[[], None], name: str) -> None:
        """Starts a helper thread. It is ended when all main threads have ended."""
        self._add(body, name, main=False)

    def give_way(self) -> None:
        """Lets other threads go first that can run now. If there are none, a tenth of a millisecond passes, so that a loop of
        such calls comes to the time of what it waits for."""
        me = self._holder
        if me is not None and me.ident == threading.get_ident():
            self.parker().park(self._now if self._runnable else self._now + TURN_SECONDS)

    def interrupt(self, number: int, error: BaseException) -> None:
        """Makes the `number`-th body of `run` raise `error` from its current wait, and from every later one."""
        thread = self._threads.get(self._first_body + number)
        if thread is not None:
            self._end(thread, error)

    def pause(self, number: int) -> None:
        """Pauses the `number`-th body of `run` at its next wait, until `unpause`."""
        thread = self._threads.get(self._first_body + number)
        if thread is not None:
            thread.paused = True
            if thread in self._runnable:
                self._runnable.remove(thread)
                thread.withheld = True

    def unpause(self, number: int) -> None:
        """Ends a pause."""
        thread = self._threads.get(self._first_body + number)
        if thread is not None:
            thread.paused = False
            self._make_runnable_again(thread)

    def run(self, bodies: Sequence[tuple[str, Callable[[], None]]], wall_seconds: float = WALL_SECONDS) -> None:
        """Runs each (name, body) as a main thread. Returns when all of them, and all helpers, have ended.

        Args:
            bodies: an exception that leaves a body ends it, and raises an error in the main threads that wait.
            wall_seconds: the limit in real seconds, without time in Python's debugger; after that the thread with the baton is
                named in an error.

        Raises:
            BaseException: the limit's error, or Ctrl-C. All threads then end at their next wait.
        """
        if self._started:
            raise UsageError("this virtual clock has already had its run", hint="make a new clock for each run")
        self._started = True
        self._first_body = self._thread_count
        try:
            for name, body in bodies:
                self._add(body, name, main=True)
            self._hand_over()
            if not is_set_within(wall_seconds, self._ended):
                raise self._overdue(wall_seconds)
        except BaseException:
            self._abandon()
            raise
        for real in self._real_threads:  # a thread may still free what it held, and the interpreter must not exit before
            real.join(wall_seconds)

    def _overdue(self, wall_seconds: float) -> FerroError:
        holder = self._holder
        where = "no thread" if holder is None else f"{holder} in {position(sys._current_frames().get(holder.ident))}"
        return FerroError(
            f"the simulated world still runs after {wall_seconds:g} real seconds, {self._now:.6f} virtual ones and "
            f"{self.switches} switches between threads; what runs is {where}",
            hint="in a simulated world wait only through group operations and the clock, never on locks or time.sleep; if it "
            "is only slow, compute less",
        )

    def _abandon(self) -> None:
        """Ends all threads at their next wait; called from outside, while one of them may run."""
        self._over = True
        if not self.switches:  # no thread has run yet, so none would end the others
            self._hand_over()

    def wait(self, parker: VirtualParker, until: float) -> None:
        """For parkers: gives the baton up until this thread is chosen again."""
        me = self._holder
        if me is None or me.ident != threading.get_ident():
            raise UsageError(
                "a thread outside the simulated world cannot wait in it",
                hint="start threads with group.session.clock.start(), or use real time",
            )
        if me.fatal is not None:
            raise me.fatal
        if parker.permit or until <= self._now:
            self._make_runnable(me)
        else:
            parker.waiter, me.parker = me, parker
            if until != FOREVER:
                self._timer_count += 1
                heapq.heappush(self._timers, (until, self._timer_count, me, me.epoch, None))
        if self._hand_over() is not me:
            self._take_baton(me)
        if me.fatal is not None:
            raise me.fatal
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def resume(self, thread: _Thread) -> None:
        """For parkers: makes a waiting thread runnable."""
        if thread.parker is not None:
            thread.parker.waiter = None
            thread.parker = None
            thread.epoch += 1
            self._make_runnable(thread)

    def _make_runnable(self, thread: _Thread) -> None:
        if thread.paused:
            thread.withheld = True
        else:
            self._runnable.append(thread)

    def _make_runnable_again(self, thread: _Thread) -> None:
        """Makes a thread runnable that was withheld because it was paused."""
        if thread.withheld:
            thread.withheld = False
            self._runnable.append(thread)

    def _add(self, body: Callable[[], None], name: str, main: bool) -> None:
        if self._over:
            raise WorldEnded
        thread = _Thread(self._thread_count, name, main)
        real = threading.Thread(target=self._run_thread, args=(thread, body), name=name, daemon=True)
        start_thread(real)  # it waits for its baton
        self._thread_count += 1
        self._main_count += main
        self._threads[thread.number] = thread
        self._runnable.append(thread)
        self._real_threads.append(real)

    def _take_baton(self, me: _Thread) -> None:
        """Waits until `me` is chosen and runs alone: freeing what an ended thread held, such as compiled code of torch, may run
        code."""
        me.baton.acquire()
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.join(LEAVING_SECONDS)

    def _run_thread(self, thread: _Thread, body: Callable[[], None]) -> None:
        self._take_baton(thread)
        thread.ident = threading.get_ident()
        try:
            if thread.fatal is None:
                body()
        except ThreadExit:
            pass
        except BaseException as error:  # noqa: BLE001  others may wait for this thread, and must not wait for ever
            self._fail(f"{thread} died of {error!r} at {traceback.extract_tb(error.__traceback__)[-1]}")
        finally:
            del self._threads[thread.number]
            self._main_count -= thread.main
            self._leaving = threading.current_thread()
            self._hand_over()

    def _hand_over(self) -> _Thread | None:
        """Passes the baton to the next thread, and returns it; None if the last thread has ended."""
        chosen = self._choose()
        self._holder = chosen
        if chosen is None:
            self._ended.set()
            return None
        self.trace = hash((self.trace, chosen.number, self._now))
        self.switches += 1
        if chosen.ident != threading.get_ident():
            chosen.baton.release()
        return chosen

    def _choose(self) -> _Thread | None:
        if self._over or not self._main_count:
            return self._end_all()
        runnable = self._runnable
        while not runnable:
            self._advance()
        count = len(runnable)
        if count == 1:
            return runnable.pop()
        index = int(self._draw() * count)
        runnable[index], runnable[-1] = runnable[-1], runnable[index]
        return runnable.pop()

    def _advance(self) -> None:
        """Moves the time to the next timer, when no thread is runnable."""
        if not self._timers or self._timers[0][0] > self._now + IDLE_SECONDS:
            for each in self._threads.values():
                each.paused = False  # nothing is left that could end the pause
            self._fail("no thread can run and no timer is due within a year")
            return
        when, _, thread, epoch, action = heapq.heappop(self._timers)
        if thread is not None:
            if thread.parker is not None and thread.epoch == epoch:
                self._now = when
                self.resume(thread)
        elif action is not None:
            self._now = when
            self._holder = None
            try:
                action()
            except Exception as error:  # noqa: BLE001  it has no caller, so the world's threads get the error
                self._fail(f"an action on the clock raised {error!r} at {traceback.extract_tb(error.__traceback__)[-1]}")

    def _fail(self, what: str) -> None:
        """Raises an error in each main thread that waits: what has happened, and where all threads wait."""
        self._failures.append(what)
        frames = sys._current_frames()
        waiting = [each for each in self._threads.values() if each.parker is not None or (each.withheld and not each.paused)]
        places = "; ".join(f"{thread} in {position(frames.get(thread.ident))}" for thread in waiting)
        why = "; before, ".join(reversed(self._failures))
        message = f"the simulated world stopped at {self._now:.6f} s: {why}. Waiting: {places}"
        for thread in waiting:
            if thread.main:
                thread.error = FerroError(message, hint="look at what each waits for; the same seed replays it")
                self.resume(thread)
                if not thread.paused:
                    self._make_runnable_again(thread)

    def _end_all(self) -> _Thread | None:
        """Ends the threads that are left, one by one."""
        self._over = True
        for thread in self._threads.values():
            self._end(thread, WorldEnded())
        return self._runnable.pop() if self._runnable else None

    def _end(self, thread: _Thread, error: BaseException) -> None:
        """Makes a thread raise an error from its current wait, and from every later one."""
        thread.fatal = error
        thread.paused = False
        self._make_runnable_again(thread)
        self.resume(thread)


def is_set_within(wall_seconds: float, event: threading.Event) -> bool:
    """Waits for an event for so many real seconds, and on while somebody is in a debugger of Python's `bdb`, such as pdb."""
    while not event.wait(wall_seconds):
        if not any(_is_debugged(frame) for frame in sys._current_frames().values()):
            return False
    return True


def _is_debugged(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != "bdb":
        frame = frame.f_back
    return frame is not None


def position(frame: FrameType | None) -> str:
    """Where a thread is, given its frame: innermost call first, without frames of this file and of `threading`."""
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES_SHOWN:
        code = frame.f_code
        if code.co_filename not in (__file__, threading.__file__):
            calls.append(f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(calls) or "its start"
