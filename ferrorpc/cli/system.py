"""What commands ask of the operating system: its kind, the available CPUs, their own path."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from ferrorpc.errors import ConfigError

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


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
    return math.ceil(min(len(os.sched_getaffinity(0)), *_limits()))


def _limits() -> Iterator[float]:
    """The CPU quota, in CPUs, of each control group (version 1 or 2) that contains this process.

    In a container the path may be the host's and then does not exist; the container's own group is the root there.
    """
    yield math.inf
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield _limit(*(_GROUPS / controllers / group / name for name in names))


def _limit(*files: Path) -> float:
    """A quota from "QUOTA PERIOD" in one file or two; "max" or -1 means unlimited."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
