"""The machine that measurements were made on, described in every result."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ferrorpc.versions import version_of

_JIFFY_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK")
_PACKAGES: Final = ("ferrorpc", "grpcio", "protobuf", "numpy", "torch", "mpi4py", "mpich", "pyarrow", "ml_dtypes")


def describe() -> dict[str, Any]:
    """Processor, number of CPUs this process may use, memory, system, load average and versions, for a result file."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := version_of(name))},
    }


def line(machine: dict[str, Any], loads: list[float]) -> str:
    """The same in one line, with the load average during the measurement."""
    seen = f"{min(loads):.1f} to {max(loads):.1f}" if loads else f"{machine['load_average'][0]:.1f}"
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    return f"{machine['cpus']} CPUs ({machine['processor']}), load average {seen}; Python {machine['python']}, {versions}"


def busy_seconds() -> float:
    """CPU seconds since boot used by processes or stolen by other guests of the host, without interrupts."""
    names = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    user, nice, system, _, _, _, _, steal = map(int, names[:8])
    return (user + nice + system + steal) * _JIFFY_SECONDS


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = text.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
