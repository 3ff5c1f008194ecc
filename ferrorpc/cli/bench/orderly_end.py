"""Signals that stop a measurement while it has something to undo."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end this process by way of what is to be undone, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
