"""What commands need of the operating system, and what it gives them."""

from __future__ import annotations

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
    """What the shell that called ferrorpc calls it: its name where that is on the PATH, else what lies beside this Python."""
    beside = Path(sys.executable).with_name("ferrorpc")
    found = shutil.which("ferrorpc")
    if found is not None and (not beside.exists() or Path(found).samefile(beside)):
        return "ferrorpc"
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m ferrorpc"
    near = beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside
    return shlex.quote(str(near))


def processors() -> int:
    """How many may be kept busy from here: those this process may run on, but no more than a container's limit pays for."""
    return math.ceil(min(len(os.sched_getaffinity(0)), *_limits()))


def _limits() -> Iterator[float]:
    """Seconds of processor time a second that each control group around this process allows, in either version's files.

    Within a container the path may be the host's, and then it leads nowhere; the container's own group is the root there.
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
    """From "QUOTA PERIOD" in one file, or in two; a quota of "max" or -1 is none."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
