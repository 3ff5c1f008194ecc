"""A GPU's events, through CuPy, and CUDA's answers that say that a GPU has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ferrorpc.arrays import capture_mode
from ferrorpc.errors import BackendUnavailableError

_SUCCESS: Final = 0
_NOT_READY: Final = 600
CAPTURING: Final = range(900, 909)
"""What CUDA answers where a graph is being captured, or an event was recorded in a capture."""
_FAILED: Final = frozenset((214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))
"""What it answers to every call, whatever it is, once memory, a link, a kernel or the MPS client of this process has failed."""
_ERRORS: Final = ("CUDARuntimeError", "CUDADriverError")
"""CuPy's classes: that of copies, events and streams, and that of kernels."""


class Event:
    """A mark in a stream, without timing. Its device records it anew once nobody else refers to it; streams that were told to
    wait for it still wait for the earlier record.

    Args:
        runtime: the module `cupy.cuda.runtime`.
        number: the CUDA event.
        have_context: makes its GPU the calling thread's where that has used none.
    """

    __slots__ = ("_have_context", "_runtime", "number")

    def __init__(self, runtime: Any, number: int, have_context: Callable[[], None]) -> None:
        self._runtime = runtime
        self._have_context = have_context
        self.number = number

    @property
    def done(self) -> bool:
        """Whether the GPU has reached it. Any thread may ask, also while a CUDA graph is being captured, and whichever device
        is its current one. A thread that has used no GPU stands on the event's from then on.

        Raises:
            BackendUnavailableError: the GPU has failed, and will reach no event any more; or a CUDA graph that is being
                captured holds the event.
        """
        runtime = self._runtime
        self._have_context()
        mode = capture_mode.exchange(capture_mode.RELAXED)
        try:
            status = runtime.eventQuery(self.number)
        finally:
            capture_mode.exchange(mode)
        if status == _SUCCESS:
            return True
        if status == _NOT_READY:
            return False
        try:
            runtime.check_status(status)
        except runtime.CUDARuntimeError as failure:
            if status in CAPTURING:
                raise BackendUnavailableError(
                    f"a CUDA graph is being captured, or holds the operation: {failure}",
                    "operations cannot be captured: begin them, and wait for them, before the capture or after it",
                ) from None
            raise _gpu_has_failed(failure) from None
        raise AssertionError(f"CUDA knows no status {status}")


def translated(failure: Exception) -> Exception:
    """An error as it is; CuPy's for a call that queues work as BackendUnavailableError if the GPU had failed before."""
    is_cuda = type(failure).__name__ in _ERRORS
    return _gpu_has_failed(failure) if is_cuda and getattr(failure, "status", 0) in _FAILED else failure


def _gpu_has_failed(failure: Exception) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the GPU has failed: {failure}",
        "look for the kernel with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; the process has to be started again",
    )
