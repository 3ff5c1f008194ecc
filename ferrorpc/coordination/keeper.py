"""Runs a coordinator for as long as the process that started this one lives, and a little longer.

    python -m ferrorpc.coordination.keeper LINGER_SECONDS [flags of ferrorpc_coordinator]

The starter holds the other end of this process's standard input; when that closes, however the starter ended, the
coordinator is given LINGER_SECONDS more, in which it tells the other members who died and hears their goodbyes.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from typing import Final

STOP_SECONDS: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Returns the coordinator's exit code."""
    linger_seconds, flags = float(sys.argv[1]), sys.argv[2:]
    command = [sys.executable, "-m", "ferrorpc_coordinator", *flags]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    ended = os.pidfd_open(child.pid)
    readable, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    if ended not in readable:
        select.select([ended], [], [], linger_seconds)
        child.terminate()
        if not select.select([ended], [], [], STOP_SECONDS)[0]:
            child.kill()
    return child.wait()


def _die_with_parent() -> None:
    """In the child, before it becomes the coordinator: not even kill -9 of the keeper leaves it behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
