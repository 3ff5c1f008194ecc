"""What this process uses of the machine's memory, as Linux counts it; of memory it shares, only its share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_ROLLUP: Final = Path("/proc/self/smaps_rollup")
_RESET_PEAK: Final = "5"


def resident_bytes() -> int:
    """Bytes of memory that are this process's now."""
    return _field(_STATUS, "VmRSS") - _of_others()


def peak_bytes() -> int:
    """The most that `resident_bytes` has been since `reset_peak`, if what is shared was never more than now."""
    return _field(_STATUS, "VmHWM") - _of_others()


def reset_peak() -> None:
    """Begins a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _of_others() -> int:
    """Shared pages are resident in each process that maps them; of two, each has half."""
    return _field(_STATUS, "RssShmem") - _field(_ROLLUP, "Pss_Shmem")


def _field(file: Path, name: str) -> int:
    line = next(line for line in file.read_text(encoding="ascii").splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
