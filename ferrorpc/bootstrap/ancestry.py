"""Which launcher a process descends from, for launchers whose variables give ranks but no name of the run.

MPICH's mpiexec is one. All processes that one of its runs has on a host descend from one process of the launcher; between
that and a rank there may be shells and wrappers, which have the rank's variables, as the launcher's own process has not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def launcher_of(variable: str, process: int | None = None, proc: Path = _PROC) -> str:
    """The id of the nearest ancestor that was started without `variable`; empty where that cannot be seen.

    Args:
        variable: what the launcher sets for each of its processes.
        process: whose ancestors; None for this process.
        proc: where the kernel shows processes.
    """
    try:
        ancestor = os.getppid() if process is None else _parent(process, proc)
        while ancestor and _started_with(variable, ancestor, proc):
            ancestor = _parent(ancestor, proc)
    except OSError:  # no /proc, or another user's process
        return ""
    return str(ancestor) if ancestor else ""


def _parent(process: int, proc: Path) -> int:
    """0 where it is outside this process namespace."""
    _, _, after_name = (proc / str(process) / "stat").read_text().rpartition(")")
    return int(after_name.split()[1])


def _started_with(variable: str, process: int, proc: Path) -> bool:
    entries = (proc / str(process) / "environ").read_bytes().split(b"\0")
    return any(entry.startswith(variable.encode() + b"=") for entry in entries)
