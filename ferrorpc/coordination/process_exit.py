"""How a member's process ends: it leaves its jobs, tells the reason if there is one, and exits with the code of its error.

A forked child is no member: the sessions that it inherits do nothing. It cannot join either, because gRPC's threads do not
survive a fork, and calls hang.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Final, Protocol

from ferrorpc.errors import FerroError, UsageError
from ferrorpc.exit_codes import exit_code_of
from ferrorpc.generation_errors import SPAWN_HINT, reason_of
from ferrorpc.tracebacks import shortened

LEAVE_ALL_SECONDS: Final = 12.0
"""For all sessions together. One takes under a second, unless its coordinator is there and does not answer."""

_log = logging.getLogger("ferrorpc.coordination")


class MemberSession(Protocol):
    """A session that is left when the process ends."""

    def leave(self, reason: str = "") -> None:
        """Leaves the job."""

    def abandon_in_child(self) -> None:
        """In a forked child: makes the session unusable, without touching the parent's connection."""


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_sessions: weakref.WeakSet[MemberSession] = weakref.WeakSet()
_at_exit: set[tuple[int, Callable[[], None]]] = set()
"""Process id and action: a forked child inherits none of multiprocessing's finalizers."""
_reason = ""
"""Of the exception that ends this process of multiprocessing."""
_hook: Hook | None = None
"""This module's sys.excepthook, once it is installed."""
_had_sessions = False
"""Whether this process, or the one it was forked from, has been a member."""
_forked_from_member = False


def at_exit(action: Callable[[], None]) -> None:
    """Calls `action` when this process ends, at least once. Processes that multiprocessing forked call nothing of `atexit`
    before Python 3.14, but its finalizers."""
    if (os.getpid(), action) in _at_exit:
        return
    _at_exit.add((os.getpid(), action))
    atexit.register(action)
    processes, finalizers = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if processes is not None and finalizers is not None and processes.parent_process() is not None:
        calls_atexit = sys.version_info >= (3, 14) or getattr(processes.current_process(), "_start_method", "") == "spawn"
        finalizers.Finalize(None, _note_reason if calls_atexit else partial(_after_threads, action), exitpriority=0)


def _note_reason() -> None:
    """Keeps the reason of an exception that ends this process of multiprocessing, which is over when `atexit` is called."""
    global _reason
    _reason = _reason_of_end(sys.exception())


def _reason_of_end(error: BaseException | None) -> str:
    """What an exception that ends the process says. Of an exit with a status, that says the exception which it was called for,
    as torch.multiprocessing does."""
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    return "" if error is None else reason_of(error)


def _after_threads(action: Callable[[], None]) -> None:
    """Calls `action` once threads that are no daemons, and thread pools, have ended, as where `atexit` is called."""
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls next; the second call does nothing
    action()


def install_hooks() -> None:
    """Hooks this process's uncaught exceptions, those of threads too, and forks. Idempotent."""
    global _hook
    if _hook is not None:
        return
    os.register_at_fork(after_in_child=_abandon_all)
    previous = sys.excepthook

    def handle_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _show(previous, kind, error, trace)
        if _is_at_prompt():
            return
        leave_all(reason_of(error))
        code = exit_code_of(error)
        if code is not None:
            raise SystemExit(code)

    sys.excepthook = _hook = handle_uncaught
    previous_of_threads = threading.excepthook

    def handle_uncaught_in_thread(raised: threading.ExceptHookArgs) -> None:
        def show(*about: object) -> object:
            return previous_of_threads(threading.ExceptHookArgs((*about, raised.thread)))

        error = raised.exc_type() if raised.exc_value is None else raised.exc_value
        _show(show, raised.exc_type, error, raised.exc_traceback)

    threading.excepthook = handle_uncaught_in_thread


def _is_at_prompt() -> bool:
    """Whether the exception that the hook is called with ends nothing: its caller is a console of the module `code` (that of
    pdb, and of the interpreter since 3.13, too), or the interpreter's own prompt, which is no frame."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if getattr(frame.f_globals.get("__spec__"), "name", "") == "code":
            return True
        frame = frame.f_back
    runs_script = hasattr(sys.modules["__main__"], "__file__") and not sys.flags.inspect
    return hasattr(sys, "ps1") and not runs_script  # a console that has ended may have left sys.ps1


def _show(hook: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Passes an exception to the previous hook. Errors of this library and Ctrl-C, those that led to it included, are shown
    without the library's own frames."""
    with shortened(error, FerroError, KeyboardInterrupt) as is_shorter:
        hook(kind, error, error.__traceback__ if is_shorter else trace)


def register(session: MemberSession) -> None:
    """Leaves this session when the process ends."""
    global _had_sessions
    install_hooks()
    at_exit(_leave_at_exit)
    _had_sessions = True
    _sessions.add(session)


def unregister(session: MemberSession) -> None:
    """Undoes `register`: the session has left."""
    _sessions.discard(session)


def refuse_in_child() -> None:
    """Raises UsageError in a process that was forked from a member, or that multiprocessing has not finished starting."""
    starting = sys.modules.get("multiprocessing.process")
    if starting is not None and getattr(starting.current_process(), "_inheriting", False):
        raise UsageError(
            f"this process ({os.getpid()}) is still being started by multiprocessing, which imports the main script for it",
            hint='put what the script does itself, this call included, under if __name__ == "__main__":',
        )
    if _forked_from_member:
        raise UsageError(
            f"this process ({os.getpid()}) was forked from one that had been a member, where gRPC does not survive",
            hint=SPAWN_HINT,
        )


def leave_all(reason: str = "") -> None:
    """Leaves every session in turn, until LEAVE_ALL_SECONDS have passed. Ctrl-C ends the wait for peers.

    Starts no thread, because an interpreter that is shutting down refuses to.
    """
    deadline = time.monotonic() + LEAVE_ALL_SECONDS
    for session in list(_sessions):
        if time.monotonic() < deadline:
            try:
                session.leave(reason)
            except KeyboardInterrupt:  # raised on, Python would print it with its traceback, and ignore it all the same
                _log.warning("interrupted at the end of this process: what it sent may not have arrived")


def _leave_at_exit() -> None:
    """Leaves every session. The reason is an exception that nobody caught: one that ends a process of multiprocessing, or that
    another hook than this module's has shown, which only sys.last_value tells. A prompt may have left an old one there."""
    error = sys.exception()
    if error is None and sys.excepthook is not _hook and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    leave_all(_reason_of_end(error) or _reason)


def _abandon_all() -> None:
    global _forked_from_member
    _forked_from_member = _had_sessions
    for session in list(_sessions):
        session.abandon_in_child()
    _sessions.clear()
