"""Waiting in tests for what comes about on other threads or in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.005


def eventually(condition: Callable[[], Any], what: str = "it", seconds: float = 60.0) -> Any:
    """What `condition` returns as soon as it is true; fails after so many seconds, with the words for what was waited for."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(LOOK_SECONDS)
    return found
