"""Run as a script between the launcher and each of its children: ties the child's life to the launcher's, then becomes it.

    python -I -S shim.py LAUNCHER_PID COMMAND [ARGUMENT ...]

PR_SET_PDEATHSIG survives exec, so the child gets SIGKILL when the launcher's main thread ends, however it ends. It is set
here and not between fork and exec in the launcher, where Python code is not safe to run.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""From its start on, also for what it becomes: `yes | head` in a shell script would end otherwise than it does elsewhere."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def become(launcher_pid: int, command: list[str]) -> int:
    """Replaces this process by `command`. Returns an exit code only when that cannot be done."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:
        return 128 + signal.SIGKILL  # the launcher ended before the line above: nobody would send the signal
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        sys.stderr.write(f"ferrorpc: no such program: {command[0]}\n")
        return NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"ferrorpc: cannot start {command[0]}: {error.strerror}\n")
        return NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
