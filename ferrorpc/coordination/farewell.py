"""How a process ends while it has seats: it says goodbye, with the reason if there is one, and its exit code is true.

A forked child is no member: what it inherits is inert. Nor can it become one: gRPC has lost its threads there, and hangs.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from types import TracebackType
from typing import Final, Protocol

from ferrorpc.errors import ConfigError, FerroError, UsageError

EXIT_CONFIG: Final = 64
"""Bad configuration: retrying cannot help."""
EXIT_MEMBERSHIP: Final = 75
"""The membership was lost, or somebody in it: retrying can help."""
GOODBYE_SECONDS: Final = 2.0


class Seat(Protocol):
    """What can be left."""

    def leave(self, reason: str = "") -> None:
        """Says goodbye."""

    def abandon_in_child(self) -> None:
        """Becomes inert."""


_seats: weakref.WeakSet[Seat] = weakref.WeakSet()
_installed = False
_had_seats = False
"""This process, or the one it was forked from, has been a member."""
_forked_from_member = False


def install() -> None:
    """Hooks the ends of this process, once: its exit, its uncaught exceptions and its forks."""
    global _installed
    if _installed:
        return
    _installed = True
    atexit.register(say_goodbye)
    os.register_at_fork(after_in_child=_abandon_all)
    previous = sys.excepthook

    def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        say_goodbye(reason_of(error))
        code = exit_code(error)
        if code is not None:
            raise SystemExit(code)

    sys.excepthook = last_words


def watch_over(seat: Seat) -> None:
    """Leaves this seat when the process ends."""
    global _had_seats
    install()
    _had_seats = True
    _seats.add(seat)


def refuse_in_child() -> None:
    """Raises UsageError in a process that was forked from a member."""
    if _forked_from_member:
        raise UsageError(
            f"this process ({os.getpid()}) was forked from one that had been a member, where gRPC does not survive",
            hint="start it with the spawn method (multiprocessing.get_context('spawn')), or before init_process_group()",
        )


def forget(seat: Seat) -> None:
    """This seat has been left."""
    _seats.discard(seat)


def reason_of(error: BaseException) -> str:
    """An exception as the others read it: "ValueError: no such file"."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def exit_code(error: BaseException) -> int | None:
    """The exit code that tells a launcher whether to try again; None for the interpreter's own."""
    if isinstance(error, FerroError) and error.retryable:
        return EXIT_MEMBERSHIP
    return EXIT_CONFIG if isinstance(error, ConfigError) else None


def say_goodbye(reason: str = "") -> None:
    """Leaves every seat, one after the other, as many as two seconds allow.

    No thread is started: an interpreter that ends refuses to.
    """
    deadline = time.monotonic() + GOODBYE_SECONDS
    for seat in list(_seats):
        if time.monotonic() < deadline:
            seat.leave(reason)


def _abandon_all() -> None:
    global _forked_from_member
    _forked_from_member = _had_seats
    for seat in list(_seats):
        seat.abandon_in_child()
    _seats.clear()
