"""Runs a coordinator for as long as the process that started this one lives, and a little longer.

    python -P -m ferrorpc.coordination.keeper [flags of ferrorpc_coordinator]

The starter holds the other end of this process's standard input. When that closes the starter has died, and the coordinator
is given a few seconds more to find that out and tell the other members. When a byte comes first, the starter ended in good
order, and the coordinator only hears the goodbyes of those who end with it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from typing import Final

LINGER_SECONDS: Final = 5.0
CLEAN_LINGER_SECONDS: Final = 1.0
STOP_SECONDS: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Returns the coordinator's exit code."""
    command = [sys.executable, "-P", "-m", "ferrorpc_coordinator", "--transient", *sys.argv[1:]]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    ended = os.pidfd_open(child.pid)
    lifeline = sys.stdin.fileno()
    readable, _, _ = select.select([lifeline, ended], [], [])
    if ended not in readable:
        clean = bool(os.read(lifeline, 1))
        select.select([ended], [], [], CLEAN_LINGER_SECONDS if clean else LINGER_SECONDS)
        child.terminate()
        if not select.select([ended], [], [], STOP_SECONDS)[0]:
            child.kill()
    return child.wait()


def _die_with_parent() -> None:
    """In the child, before it becomes the coordinator: not even kill -9 of the keeper leaves it behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
