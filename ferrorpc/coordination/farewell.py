"""How a process ends while it has seats: it says goodbye, with the reason if there is one, and its exit code is true.

A forked child is no member: what it inherits is inert. Nor can it become one: gRPC has lost its threads there, and hangs.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Protocol

from ferrorpc.errors import FerroError, UsageError
from ferrorpc.exit_codes import exit_code_of

GOODBYE_SECONDS: Final = 2.0
_PACKAGE: Final = __name__.partition(".")[0]


class Seat(Protocol):
    """What can be left."""

    def leave(self, reason: str = "") -> None:
        """Says goodbye."""

    def abandon_in_child(self) -> None:
        """Becomes inert."""


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

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
        _show(previous, kind, error, trace)
        say_goodbye(reason_of(error))
        code = exit_code_of(error)
        if code is not None:
            raise SystemExit(code)

    sys.excepthook = last_words


def _show(hook: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Hands an exception to the hook: an error of this library without the library's own lines, which nobody has to mend."""
    shown, left_out = _callers_part(trace)
    if not left_out or not isinstance(error, FerroError) or logging.getLogger(_PACKAGE).isEnabledFor(logging.DEBUG):
        hook(kind, error, trace)
        return
    error.add_note(f"({left_out} calls within {_PACKAGE} are left out above; FERRORPC_LOG_LEVEL=DEBUG shows them)")
    error.__traceback__ = shown
    hook(kind, error, shown)
    error.__traceback__ = trace


def _callers_part(trace: TracebackType | None) -> tuple[TracebackType | None, int]:
    """A traceback up to its last entry that is not this library's, or the whole if all are; and how many that leaves out."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    others = [number for number, entry in enumerate(entries, 1) if not _is_own(entry.tb_frame)]
    kept = others[-1] if others else len(entries)
    part = None
    for entry in reversed(entries[:kept]):
        part = TracebackType(part, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return part, len(entries) - kept


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


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
