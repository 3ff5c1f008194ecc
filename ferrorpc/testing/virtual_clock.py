"""A clock whose time is a number, and threads of which one runs at a time: a world that replays from its seed.

The idea: a baton. A thread of the world runs only while it holds it, and gives it up only in `park`, the one place where
anything in the data plane waits. Which of the runnable threads gets it next is drawn from `random.Random(seed)`. When none is
runnable, time jumps to the next timer: a message that arrives, or a deadline. So nothing really sleeps, a second of the
world costs what happens in it, and the same seed gives the same interleaving to the last step (`trace` proves it).

Ordinary code runs in it unchanged: locks are fine as long as none is held across a `park`. When nobody is runnable and no
timer is left, everybody waits for ever: each of the world's own threads then gets an error that says where all of them wait.
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
from ferrorpc.guard import FOREVER

WALL_SECONDS: Final = 300.0
"""How long `run` really waits: only a thread that blocks or spins outside `park` ever takes that long."""
FRAMES_SHOWN: Final = 4


class Unwound(BaseException):
    """Ends a thread of the world from within its wait. Nobody needs to catch it, and nothing is said of it."""


class WorldOver(Unwound):
    """The world's own threads are done: helpers that still wait unwind."""


class _Thread:
    """One thread of the world. `baton` is locked except while the thread has been chosen to run."""

    __slots__ = ("baton", "epoch", "error", "fatal", "ident", "main", "name", "number", "parker", "paused", "withheld")

    def __init__(self, number: int, name: str, main: bool) -> None:
        self.number = number
        self.name = name
        self.main = main
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ident = 0
        self.parker: VirtualParker | None = None
        """Where it waits; None while it is runnable."""
        self.epoch = 0
        """Counts its waits, so that a timer of an earlier one is known to be stale."""
        self.error: BaseException | None = None
        """Raised once by the wait it is in."""
        self.fatal: BaseException | None = None
        """Raised by that wait and every later one."""
        self.paused = False
        self.withheld = False
        """Would be runnable, were it not paused."""


class VirtualParker:
    """A place to wait in a virtual world."""

    __slots__ = ("_clock", "permit", "waiter")

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.permit = False
        self.waiter: _Thread | None = None

    def park(self, until: float) -> bool:
        """Waits for the permit or virtual time `until`; always a point where another thread may run."""
        self._clock.wait(self, until)
        permit, self.permit = self.permit, False
        return permit

    def unpark(self) -> None:
        """Gives the permit."""
        self.permit = True
        waiter = self.waiter
        if waiter is not None:
            self._clock.resume(waiter)


class VirtualClock:
    """Virtual time and the threads that live in it. One `run` per clock.

    Args:
        seed: chooses who runs next, wherever there is a choice.

    Attributes:
        trace: a running hash of every handover: which thread, at what virtual time. Equal traces, equal interleavings.
        switches: how many handovers there were.
    """

    one_at_a_time = True

    def __init__(self, seed: int = 0) -> None:
        self.trace = 0
        self.switches = 0
        self._draw = random.Random(seed).random
        self._now = 0.0
        self._runnable: list[_Thread] = []
        self._timers: list[tuple[float, int, _Thread | None, int, Callable[[], None] | None]] = []
        self._timer_count = 0
        self._threads: dict[int, _Thread] = {}
        self._real: list[threading.Thread] = []
        self._thread_count = 0
        self._holder: _Thread | None = None
        self._mains = 0
        self._failures: list[str] = []
        self._started = False
        self._over = False
        self._ended = threading.Event()

    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    def parker(self) -> VirtualParker:
        """A new place to wait, for threads of this world."""
        return VirtualParker(self)

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Runs `action` at virtual time `when`, after what was ordered for the same time earlier. It must not park."""
        self._timer_count += 1
        heapq.heappush(self._timers, (max(when, self._now), self._timer_count, None, 0, action))

    def start(self, body: Callable[[], None], name: str) -> None:
        """A helper thread of the world: it ends when the world does, if not before."""
        self._add(body, name, main=False)

    def interrupt(self, number: int, error: BaseException) -> None:
        """The `number`-th body of `run` raises `error` from the wait it is in, and from every later one."""
        thread = self._threads.get(number)
        if thread is not None:
            thread.fatal = error
            thread.paused = False
            self._offer(thread)
            self.resume(thread)

    def pause(self, number: int) -> None:
        """The `number`-th body of `run` stands still at its next wait, until `unpause`."""
        thread = self._threads.get(number)
        if thread is not None:
            thread.paused = True
            if thread in self._runnable:
                self._runnable.remove(thread)
                thread.withheld = True

    def unpause(self, number: int) -> None:
        """It may go on."""
        thread = self._threads.get(number)
        if thread is not None:
            thread.paused = False
            self._offer(thread)

    def run(self, bodies: Sequence[tuple[str, Callable[[], None]]], wall_seconds: float = WALL_SECONDS) -> None:
        """Runs (name, body) threads in this world, from the outside; returns when all of them, and all helpers, have ended.

        Args:
            bodies: what raises out of a body ends only that body, and is lost: catch it there.
            wall_seconds: real seconds after which a thread that does not give the baton up is named in an error.
        """
        if self._started:
            raise UsageError("this virtual clock has had its world", hint="make a new clock for each run")
        self._started = True
        for name, body in bodies:
            self._add(body, name, main=True)
        self._hand_over()
        if not self._ended.wait(wall_seconds):
            holder = self._holder
            where = "nobody" if holder is None else _standing(holder, sys._current_frames())
            raise FerroError(
                f"the simulated world stands still after {wall_seconds:g} real seconds; the baton is held by {where}",
                hint="in a simulated world wait only through group operations and the clock, never on locks or time.sleep",
            )
        for real in self._real:  # which may still let go of what they held: the interpreter must not end under them
            real.join(wall_seconds)

    def wait(self, parker: VirtualParker, until: float) -> None:
        """For the parkers: gives the baton up until the thread is chosen again."""
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
            me.baton.acquire()
        if me.fatal is not None:
            raise me.fatal
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def resume(self, thread: _Thread) -> None:
        """For the parkers: a waiting thread becomes runnable."""
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

    def _offer(self, thread: _Thread) -> None:
        """A thread that was withheld is runnable again."""
        if thread.withheld:
            thread.withheld = False
            self._runnable.append(thread)

    def _add(self, body: Callable[[], None], name: str, main: bool) -> None:
        if self._over:
            raise WorldOver
        thread = _Thread(self._thread_count, name, main)
        self._thread_count += 1
        self._mains += main
        self._threads[thread.number] = thread
        self._runnable.append(thread)
        real = threading.Thread(target=self._live, args=(thread, body), name=name, daemon=True)
        self._real.append(real)
        real.start()

    def _live(self, thread: _Thread, body: Callable[[], None]) -> None:
        thread.baton.acquire()
        thread.ident = threading.get_ident()
        try:
            if thread.fatal is None:
                body()
        except Unwound:
            pass
        except Exception as error:  # noqa: BLE001  whatever it is, those who wait for this thread must not wait for ever
            self._fail(f"{name_of(thread)} died of {error!r} at {traceback.extract_tb(error.__traceback__)[-1]}")
        finally:
            del self._threads[thread.number]
            self._mains -= thread.main
            self._hand_over()

    def _hand_over(self) -> _Thread | None:
        """The baton goes to the next thread, which is returned; None when the last has ended."""
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
        if not self._mains:
            return self._last_orders()
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
        """Nobody is runnable: time goes on to the next thing that was ordered."""
        if not self._timers:
            self._fail("nobody can run and no timer is left")
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
            except Exception as error:  # noqa: BLE001  it has no caller: everybody is told
                self._fail(f"an action on the clock raised {error!r} at {traceback.extract_tb(error.__traceback__)[-1]}")

    def _fail(self, what: str) -> None:
        """Tells each of the world's own threads that wait what has happened, and where all wait."""
        self._failures.append(what)
        frames = sys._current_frames()
        waiting = [thread for thread in self._threads.values() if thread.parker is not None]
        places = "; ".join(_standing(thread, frames) for thread in waiting)
        why = "; before, ".join(reversed(self._failures))
        message = f"the simulated world stopped at {self._now:.6f} s: {why}. Waiting: {places}"
        for thread in waiting:
            if thread.main:
                thread.error = FerroError(message, hint="look at what each waits for; the same seed replays it")
                self.resume(thread)

    def _last_orders(self) -> _Thread | None:
        """The world's own threads are done: the helpers unwind, one by one."""
        self._over = True
        for thread in self._threads.values():
            thread.fatal = WorldOver()
            self.resume(thread)
        return self._runnable.pop() if self._runnable else None


def name_of(thread: _Thread) -> str:
    """For messages."""
    return f"thread {thread.name!r}"


def _standing(thread: _Thread, frames: dict[int, FrameType]) -> str:
    """Where a thread stands, innermost call first; the kit's own frames left out."""
    frame = frames.get(thread.ident)
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES_SHOWN:
        code = frame.f_code
        if code.co_filename not in (__file__, threading.__file__):
            calls.append(f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        frame = frame.f_back
    return f"{name_of(thread)} in {' < '.join(calls) or 'its start'}"
