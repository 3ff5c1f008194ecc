"""The guard process: kills what the launcher leaves behind, even when the launcher was ended by SIGKILL.

    python -I -S guardian.py [DIRECTORY ...] < pipe from the launcher

The launcher writes "+PGID" when it starts a process group and "-PGID" when that group is known to be empty. The end of the
pipe means that the launcher is gone, by whatever cause: then every group still listed is killed and the temporary
directories are removed. PR_SET_PDEATHSIG (see shim.py) reaches only the launcher's own children; this reaches their
children as well, as long as they stayed in the group.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterable


def watch(lines: Iterable[str]) -> set[int]:
    """Follows the launcher until it is gone. Returns the process groups that were still listed."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    return groups


def clear(groups: Iterable[int], directories: Iterable[str]) -> None:
    """Kills the groups and removes the directories."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it ended on its own, or runs as another user
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # whatever ends the launcher, this process has work left to do
    clear(watch(sys.stdin), sys.argv[1:])
