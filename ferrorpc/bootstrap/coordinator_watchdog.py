"""Runs a coordinator and stops it soon after the process that started both has ended.

    python -P -m ferrorpc.bootstrap.coordinator_watchdog [flags of ferrorpc_coordinator]

The starter holds the other end of this process's standard input. If that closes, the starter has died: the coordinator runs on
for LINGER_SECONDS, to notice the death and tell the other members. If a byte comes first, the starter exited normally, and the
coordinator ends itself (SIGUSR1) once the other members have left, too.
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
STOP_SECONDS: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Runs the coordinator. Returns its exit code."""
    command = [sys.executable, "-P", "-m", "ferrorpc_coordinator", "--transient", *sys.argv[1:]]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    ended = os.pidfd_open(child.pid)
    starter_pipe = sys.stdin.fileno()
    readable, _, _ = select.select([starter_pipe, ended], [], [])
    if ended not in readable:
        if os.read(starter_pipe, 1):
            child.send_signal(signal.SIGUSR1)
            return child.wait()  # as long as any member lives: it evicts those that are gone
        select.select([ended], [], [], LINGER_SECONDS)
        child.terminate()
        if not select.select([ended], [], [], STOP_SECONDS)[0]:
            child.kill()
    return child.wait()


def _die_with_parent() -> None:
    """Runs in the child before exec: a watchdog ended by kill -9 takes the coordinator with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
