"""Finds the launcher's process, whose id identifies the run if the launcher sets ranks but no id of the run.

MPICH's mpiexec is such a launcher. All processes of a run on one host descend from one process of the launcher. Shells and
wrappers between that and a rank have the rank's variables; the launcher's own process does not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def launcher_process_id(variable: str, process: int | None = None, proc: Path = _PROC) -> str:
    """The process id of the nearest ancestor that was started without `variable`; empty if that cannot be found out.

    Args:
        variable: a variable that the launcher sets for each of its processes.
        process: id of the process whose ancestors are searched; None for this process.
        proc: the folder /proc.
    """
    try:
        ancestor = os.getppid() if process is None else _parent(process, proc)
        while ancestor and _started_with(variable, ancestor, proc):
            ancestor = _parent(ancestor, proc)
    except OSError:  # no /proc, or a process of another user
        return ""
    return str(ancestor) if ancestor else ""


def _parent(process: int, proc: Path) -> int:
    """The parent's process id; 0 if it is outside this PID namespace."""
    _, _, after_name = (proc / str(process) / "stat").read_text().rpartition(")")
    return int(after_name.split()[1])


def _started_with(variable: str, process: int, proc: Path) -> bool:
    entries = (proc / str(process) / "environ").read_bytes().split(b"\0")
    return any(entry.startswith(variable.encode() + b"=") for entry in entries)
