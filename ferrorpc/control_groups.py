"""The limits that Linux's control groups, of version 1 or 2, set this process."""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


def tightest_limit(controller: str, version_1: Sequence[str], version_2: str, value_of: Callable[[str], float]) -> float:
    """The smallest limit among the control groups that contain this process; infinity where none sets one.

    In a container the path may be the host's and then does not exist; the container's own group is the root there.

    Args:
        controller: such as "memory".
        version_1: the files that say the limit in groups of version 1.
        version_2: the file that says it in those of version 2.
        value_of: reads their contents, joined by a space. Raises ValueError where they set no limit.
    """
    found, lines = [math.inf], list[str]()
    with contextlib.suppress(OSError):
        lines = _OWN_GROUPS.read_text("utf-8").splitlines()
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        names = version_1 if controllers else (version_2,)
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):
                found.append(value_of(" ".join((_GROUPS / controllers / group / name).read_text("utf-8") for name in names)))
    return min(found)
