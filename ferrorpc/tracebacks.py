"""Tracebacks of the caller's lines: this library's own frames are left out where its errors are shown."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final

_PACKAGE: Final = __name__.partition(".")[0]
_LEVEL: Final = "FERRORPC_LOG_LEVEL"
"""Read here as well, because an error may be shown before any group has set up logging."""


def is_own_frame(frame: FrameType) -> bool:
    """Whether a frame of a traceback is of this library's code, and not of its callers' or of another library."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


@contextmanager
def shortened(error: BaseException, *kinds: type[BaseException]) -> Iterator[bool]:
    """Within it, tracebacks of an exception and of those that led to it, as far as they are of these kinds, have none of this
    library's own frames, but a note of how many. Then they are whole again, for debuggers. Gives whether any is left out."""
    changed = []
    for each in () if _shows_all() else _with_what_led_to(error):
        whole = each.__traceback__
        if isinstance(each, kinds) and _shorten(each):
            changed.append((each, whole))
    try:
        yield bool(changed)
    finally:
        for each, whole in changed:
            each.__traceback__ = whole
            each.__notes__.pop()


def _shows_all() -> bool:
    return logging.getLogger(_PACKAGE).isEnabledFor(logging.DEBUG) or os.environ.get(_LEVEL) == "DEBUG"


def _with_what_led_to(error: BaseException) -> Iterable[BaseException]:
    """The exception, and all others that are shown with it, each once."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting.append(each.__cause__ if each.__suppress_context__ else each.__context__)
            waiting.extend(each.exceptions if isinstance(each, BaseExceptionGroup) else ())
    return found.values()


def _shorten(error: BaseException) -> bool:
    """Leaves the library's own frames out of a traceback, with a note of how many. Returns whether there were any."""
    shown, left_out = _callers_part(error.__traceback__)
    if left_out:
        calls, are, them = ("1 call", "is", "it") if left_out == 1 else (f"{left_out} calls", "are", "them")
        error.add_note(f"({calls} within {_PACKAGE} {are} left out above; {_LEVEL}=DEBUG shows {them})")
        error.__traceback__ = shown
    return left_out > 0


def _callers_part(trace: TracebackType | None) -> tuple[TracebackType | None, int]:
    """A traceback without the frames of this library (the whole if there are no others), and how many those are."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept = [entry for entry in entries if not is_own_frame(entry.tb_frame)] or entries
    part = None
    for entry in reversed(kept):
        part = TracebackType(part, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return part, len(entries) - len(kept)
