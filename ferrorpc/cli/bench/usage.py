"""What this process uses of the machine's memory, as Linux counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_RESET_PEAK: Final = "5"


def resident_bytes() -> int:
    """Bytes of memory that are this process's now, shared mappings included."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The most that `resident_bytes` has been since `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Begins a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _field(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
