"""The exec shim, a script that ties a child's life to the launcher's and then executes the child's command in its place.

    python -I -S exec_shim.py LAUNCHER_PID COMMAND [ARGUMENT ...]

PR_SET_PDEATHSIG survives exec, so the child gets SIGKILL when the launcher's main thread ends, for whatever reason. It is set
here because running Python code between fork and exec in the launcher is not safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these, and exec would pass that on: `yes | head` in a shell script would then report an error."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The launcher starts this script with these blocked, so that Ctrl-C shows no traceback of its imports."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def tied_to_this_process(command: list[str]) -> list[str]:
    """The command line that executes `command` so that it ends with this process's main thread, which has to start it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def execute(launcher_pid: int, command: list[str]) -> int:
    """Replaces this process by `command`. Returns an exit code only if that fails."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:
        return 128 + signal.SIGKILL  # the launcher ended before the line above: nobody would send the signal
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        sys.stderr.write(f"ferrorpc: no such program: {command[0]}\n")
        return NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"ferrorpc: cannot start {command[0]}: {error.strerror}\n")
        return NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(execute(int(sys.argv[1]), sys.argv[2:]))
