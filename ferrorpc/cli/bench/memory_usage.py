"""This process's memory use, as Linux counts it; of shared memory, only its proportional share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_ROLLUP: Final = Path("/proc/self/smaps_rollup")
_RESET_PEAK: Final = "5"


def resident_bytes() -> int:
    """Bytes of memory in use now."""
    return _field(_STATUS, "VmRSS") - _shares_of_others()


def peak_bytes() -> int:
    """The maximum of `resident_bytes` since `reset_peak`, provided that shared memory was never larger than now."""
    return _field(_STATUS, "VmHWM") - _shares_of_others()


def reset_peak() -> None:
    """Resets the peak to the present memory use."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _shares_of_others() -> int:
    """Bytes of shared pages that count as other processes': if two map a page, each has half of it."""
    return _field(_STATUS, "RssShmem") - _field(_ROLLUP, "Pss_Shmem")


def _field(file: Path, name: str) -> int:
    line = next(line for line in file.read_text(encoding="ascii").splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
