"""The cleanup process: kills the launcher's process groups once the launcher is gone, even after SIGKILL.

    python -I -S cleanup.py [DIRECTORY ...] < pipe from the launcher

The launcher writes "+PGID" when it starts a process group and "-PGID" when that group is known to be empty. The pipe closes
when the launcher ends, for whatever reason. Then every group still listed is killed and the temporary directories are
removed. PR_SET_PDEATHSIG (see exec_shim.py) covers only the launcher's direct children; this also covers their descendants, as
long as they stay in the group. The launcher starts this process with the signals blocked that schedulers send to every process
of a job.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterable


def groups_left(lines: Iterable[str]) -> set[int]:
    """Reads the launcher's lines until the pipe closes. Returns the process groups that are still listed."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    return groups


def clean_up(groups: Iterable[int], directories: Iterable[str]) -> None:
    """Kills the groups and removes the directories."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, or runs as another user
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    clean_up(groups_left(sys.stdin), sys.argv[1:])
