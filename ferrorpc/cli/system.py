"""What commands ask of the operating system: its kind, the available CPUs, their own path."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

from ferrorpc.control_groups import tightest_limit
from ferrorpc.errors import ConfigError


def require_linux(what: str, hint: str) -> None:
    """Raises ConfigError on any other system."""
    if sys.platform != "linux":
        raise ConfigError(f"{what} needs Linux, and this is {sys.platform}", hint=hint)


def own_command() -> str:
    """How to call ferrorpc from the user's shell: by name if it is on the PATH, else by the path beside this Python."""
    beside = Path(sys.executable).with_name("ferrorpc")
    found = shutil.which("ferrorpc")
    if found is not None and (not beside.exists() or Path(found).samefile(beside)):
        return "ferrorpc"
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m ferrorpc"
    with contextlib.suppress(OSError, ValueError):  # the working directory was removed, or is elsewhere
        beside = beside.relative_to(Path.cwd())
    return shlex.quote(str(beside))


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, limited by its container's CPU quota (rounded up)."""
    quota = tightest_limit("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), "cpu.max", _quota_of)
    return math.ceil(min(len(os.sched_getaffinity(0)), quota))


def _quota_of(text: str) -> float:
    """The CPUs of "QUOTA PERIOD"; -1 means unlimited. Raises ValueError for "max"."""
    quota, period = map(int, text.split())
    return quota / period if quota > 0 else math.inf
