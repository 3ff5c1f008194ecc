"""Ctrl-C in tests, at one place after another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptAt:
    """For sys.setprofile: raises KeyboardInterrupt once, where Python may: as a function of what is tested begins, or after one
    that it called.

    Python does so nowhere else, nor between a lock's `__enter__` and the body.

    Args:
        place: counted from 1.
        is_tested: whether the functions of a file count.
    """

    def __init__(self, place: int, is_tested: Callable[[str], bool]) -> None:
        self.left = place
        self._is_tested = is_tested

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event not in ("call", "c_return") or not self._is_tested(frame.f_code.co_filename):
            return
        if event == "c_return" and called.__name__ in ("__enter__", "__exit__"):
            return
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def was_struck(place: int, call: Callable[[], object], files: tuple[str, ...]) -> bool:
    """Interrupts a call at that place in these files. Returns whether the call got there."""
    strike, before = InterruptAt(place, lambda file: file.endswith(files)), sys.getprofile()
    sys.setprofile(strike)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False
