"""Runs a function on every rank, each on a thread of its own, and collects results and errors."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar, overload

from ferrorpc.errors import FerroError, UsageError
from ferrorpc.generation_errors import reason_of
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Clock
from ferrorpc.testing.faults import RankKilled
from ferrorpc.testing.virtual_clock import VirtualClock, is_set_within, position

Returned = TypeVar("Returned")

WALL_SECONDS: Final = 100.0
"""Ranks that have not ended after so many real seconds are a failure, unless one is in Python's debugger."""


class RankThreads:
    """Runs fn(group) for each of `groups`, and keeps what it returned or raised.

    When fn returns, its group is closed. When it raises, the rank leaves with that error, so that others do not wait for it.
    """

    def __init__(self, groups: Sequence[ProcessGroup], clock: Clock) -> None:
        self.outcomes: list[Any] = [None] * len(groups)
        self.killed: dict[int, RankKilled] = {}
        self._groups = groups
        self._clock = clock
        self._failed: list[int] = []
        self._ended: list[int] = []
        self._threads: list[threading.Thread] = []
        self._all_ended = threading.Event()

    def run(self, fn: Callable[[ProcessGroup], Any], return_exceptions: bool) -> list[Any]:
        """What each rank returned, in rank order. Raises as `run_world`."""
        if self._threads:
            raise UsageError("this world has already had its run", hint="make a new world for each run")
        bodies = [(f"rank {rank}", self._body(rank, group, fn)) for rank, group in enumerate(self._groups)]
        if isinstance(self._clock, VirtualClock):
            self._clock.run(bodies, WALL_SECONDS)
        else:
            try:
                for name, body in bodies:
                    self._clock.start(body, name)
                if bodies and not is_set_within(WALL_SECONDS, self._all_ended):
                    raise self._overdue()
            except BaseException as error:
                self._abandon(error)
                raise
            for thread in self._threads:  # a thread may still free what it held
                thread.join(WALL_SECONDS)
        if self._failed and not return_exceptions:
            raise self._first_cause()
        return self.outcomes

    def _overdue(self) -> FerroError:
        frames = sys._current_frames()
        still = [
            f"{thread.name!r} in {position(frames.get(thread.ident or 0))}" for thread in self._threads if thread.is_alive()
        ]
        error = FerroError(
            f"{len(still)} of {len(self._groups)} ranks still run after {WALL_SECONDS:g} s: {'; '.join(still)}",
            hint="look at what each waits for, and give waits outside of ferrorpc a timeout; if it is only slow, compute less",
        )
        for thread in threading.enumerate():  # such as the one that drives asynchronous operations
            if thread not in self._threads and thread is not threading.current_thread():
                error.add_note(f"thread {thread.name!r} is in {position(frames.get(thread.ident or 0))}")
        return error

    def _abandon(self, error: BaseException) -> None:
        """Ends the ranks at their next operation, or their next `reform`."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # a third party's backend may raise anything, and the others must end too
                group.abort(error)
                group.session.leave(reason_of(error))  # a later generation of the rank has another group

    def _body(self, rank: int, group: ProcessGroup, fn: Callable[[ProcessGroup], Any]) -> Callable[[], None]:
        def body() -> None:
            self._threads.append(threading.current_thread())
            try:
                with group:
                    try:
                        self.outcomes[rank] = fn(group)
                    except BaseException as error:
                        self._note_failure(rank, error)
                        raise
            except BaseException as error:  # noqa: BLE001  it is kept, and raised by run()
                if rank not in self._failed:
                    self._note_failure(rank, error)
            finally:
                self._end(rank)

        return body

    def _note_failure(self, rank: int, error: BaseException) -> None:
        """Records a failure before other ranks can see it: the first is the cause, and later ones are consequences."""
        self.outcomes[rank] = error
        if rank not in self.killed:
            self._failed.append(rank)

    def _end(self, rank: int) -> None:
        if rank in self.killed:
            self.outcomes[rank] = self.killed[rank]
        self._ended.append(rank)
        if len(self._ended) == len(self._groups):
            self._all_ended.set()

    def _first_cause(self) -> BaseException:
        """The first failure, with the others as notes. If several ranks raised the same, it is the lowest rank's."""
        first: BaseException = self.outcomes[self._failed[0]]
        chosen = min(rank for rank in self._failed if repr(self.outcomes[rank]) == repr(first))
        error: BaseException = self.outcomes[chosen]
        error.add_note(f"raised on rank {chosen} of {len(self._groups)}")
        for rank in sorted(self._failed):
            if rank != chosen:
                other = self.outcomes[rank]
                error.add_note(f"rank {rank}: {type(other).__name__}: {other}")
        return error


@overload
def run_groups(
    groups: Sequence[ProcessGroup], fn: Callable[[ProcessGroup], Returned], *, return_exceptions: Literal[False] = ...
) -> list[Returned]: ...
@overload
def run_groups(
    groups: Sequence[ProcessGroup], fn: Callable[[ProcessGroup], Returned], *, return_exceptions: bool
) -> list[Returned | BaseException]: ...
def run_groups(
    groups: Sequence[ProcessGroup], fn: Callable[[ProcessGroup], Any], *, return_exceptions: bool = False
) -> list[Any]:
    """Runs fn(group) for each of these groups, which are the ranks of one world in this process, on real threads.

    For testing your own backend; `run_world` makes simulated ones. Returns and raises as that does.
    """
    return RankThreads(groups, SYSTEM_CLOCK).run(fn, return_exceptions)
