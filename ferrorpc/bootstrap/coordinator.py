"""Starts the coordinator in rank 0, if a launcher sets ranks but no coordinator is named."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ferrorpc.config import Config
from ferrorpc.coordination import process_exit
from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import is_loopback, is_taken, join_address, split_address

START_SECONDS: Final = 30.0
PORT_SECONDS: Final = 8.0
"""How long the port may be taken: the coordinator of a run that was killed lingers, and ends within that time."""
_BLOCKED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send to every process of a job, whose ranks may handle them and go on: they do not end it."""
_POLL_SECONDS: Final = 0.1
_PROGRAM: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
try:
    from ferrorpc_coordinator.__main__ import main
except ImportError as error:
    print(*str(error).split())
    sys.exit(1)
sys.exit(main(sys.argv[2:]))
"""
"""Runs the coordinator with its starter's import path, or says in one line why it cannot be imported."""
_log = logging.getLogger("ferrorpc.bootstrap")
_pipes: dict[str, int] = {}
"""Address -> the pipe to the coordinator. Its end means that this process has ended; a byte in it, that it exited normally."""


def start_coordinator(address: str, config: Config, environment: Mapping[str, str]) -> None:
    """Starts a coordinator on `address` and waits until it listens. One that this process started before is used again.

    It listens on loopback if `address` is a loopback address, and otherwise on the setting `bind`. It ends soon after this
    process, however that ends.

    Raises:
        ConfigError: it could not start; what it said itself, unless that is here, is on standard error.
    """
    if address in _pipes:
        if _is_running(_pipes[address]):
            return
        os.close(_pipes.pop(address))
    if sys.platform != "linux":
        hint = "run `ferrorpc coordinator` and name it in FERRORPC_COORDINATOR"
        raise ConfigError(f"rank 0 starts a coordinator on Linux only, and this is {sys.platform}", hint=hint)
    host, port = split_address(address)
    listen = address if is_loopback(host) else join_address(config["bind"], port)
    if not is_loopback(host) and is_loopback(config["bind"]):
        raise ConfigError(
            f"rank 0 is at {host}, but FERRORPC_BIND={config['bind']} would hide its coordinator from the other nodes",
            hint="set FERRORPC_BIND=0.0.0.0 on every node, with FERRORPC_TLS_* or FERRORPC_INSECURE=1",
        )
    _await_port(listen)
    announced, pipe, process = _spawn(["--listen", listen], {**environment, **config.given()})
    try:
        ready = _first_line(announced)
        if ready is not None and ready.startswith(b"listening"):
            _pipes[address] = pipe
            process_exit.at_exit(_announce_exit)
            return
    except BaseException:
        _pipes.pop(address, None)
        os.close(pipe)  # what nobody knows of then ends
        raise
    finally:
        os.close(announced)
    os.close(pipe)
    code = _end(process)
    if ready is None:
        raise ConfigError(
            f"the coordinator that rank 0 started did not listen on {listen} within {START_SECONDS:g} s",
            hint="see what slows this host down (its load, memory, the file system that Python's modules are read from), or "
            "run `ferrorpc coordinator` and name it in FERRORPC_COORDINATOR",
            retryable=True,
        )
    if import_error := ready.decode(errors="replace").strip():
        raise ConfigError(
            f"rank 0 could not start a coordinator on {listen}: {import_error}",
            hint=f"install ferrorpc and what it needs for {sys.executable}, or put where they are into PYTHONPATH, or name a "
            "coordinator that runs in FERRORPC_COORDINATOR",
        )
    raise ConfigError(
        f"rank 0 could not start a coordinator on {listen} (exit code {code})",
        hint="read its message above; where another run has the port, give each run a FERRORPC_PORT of its own, such as "
        "$((20000 + SLURM_JOB_ID % 10000)), or name a coordinator that runs",
    )


def _end(process: int) -> str:
    """Ends one that has not said in time that it listens. Returns its exit code."""
    try:
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:  # so its id is still its own
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
    except (ChildProcessError, ProcessLookupError):  # this process ignores SIGCHLD, or waits for all its children elsewhere
        return "unknown"
    return str(os.waitstatus_to_exitcode(status))


def _is_running(pipe: int) -> bool:
    """Whether the coordinator still runs."""
    end = select.poll()
    end.register(pipe, 0)
    return not end.poll(0)


def _await_port(listen: str) -> None:
    """Waits up to PORT_SECONDS until the port is free: a launcher may restart ranks before the old coordinator has ended."""
    host, port = split_address(listen)
    until = time.monotonic() + PORT_SECONDS
    logged = False
    while is_taken(host, port) and time.monotonic() < until:
        if not logged:
            logged = True
            _log.warning("%s is taken: if by the coordinator of a run before, it ends within %g s", listen, PORT_SECONDS)
        time.sleep(_POLL_SECONDS)


def _spawn(arguments: list[str], environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Starts the coordinator in a session of its own, so that Ctrl-C does not reach it.

    Returns:
        The descriptor to read the ready line from, the pipe that tells the coordinator when this process ends, and its process
        id.

    Raises:
        ConfigError: the system refuses a process.
    """
    program = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(_import_path()), "--transient", "--starter-fd", "0", *arguments]
    try:
        with contextlib.ExitStack() as own:  # closed where this is interrupted, too: a coordinator that was started then ends
            with contextlib.ExitStack() as passed_on:
                announced, announcing = _pipe(own, passed_on)
                watched, pipe = _pipe(passed_on, own)
                process = os.posix_spawn(
                    sys.executable,
                    program,
                    dict(environment),
                    file_actions=[(os.POSIX_SPAWN_DUP2, watched, 0), (os.POSIX_SPAWN_DUP2, announcing, 1)],
                    setsid=True,
                    setsigmask=_BLOCKED,
                )
            own.pop_all()
    except OSError as error:
        raise ConfigError(
            f"rank 0 could not start a coordinator: {error.strerror}",
            hint="raise the limits of processes (`ulimit -u`) and open files (`ulimit -n`), or run `ferrorpc coordinator` and "
            "name it in FERRORPC_COORDINATOR",
            retryable=True,
        ) from None
    return announced, pipe, process


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """The two ends of a pipe, each of which a context closes."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


def _import_path() -> list[str]:
    """This process's, in its order. The script's folder, in which other modules lie, is in it only if ferrorpc lies there, or
    if it is one of Python's own, as with `python -m cProfile`."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    pythons = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    left_out = {"", script and os.path.dirname(os.path.abspath(script))}.difference(pythons)
    path = [each for each in sys.path if each not in left_out]
    own = (_folder_of("ferrorpc"), _folder_of("ferrorpc_coordinator"))
    return [*(folder for folder in dict.fromkeys(own) if folder and folder not in path), *path]


def _folder_of(package: str) -> str:
    """The folder or zip from which this process imports a package; empty if from none."""
    found = find_spec(package)
    return str(Path(found.origin).absolute().parents[1]) if found and found.origin else ""


def _first_line(descriptor: int) -> bytes | None:
    """The first line from a descriptor; a part of it if the descriptor ends, None if START_SECONDS pass."""
    deadline = time.monotonic() + START_SECONDS
    line = b""
    readable = select.poll()  # takes any descriptor, select() only those below 1,024
    readable.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n"):
        if not readable.poll(1000 * max(0.0, deadline - time.monotonic())):
            return None
        chunk = os.read(descriptor, 1)
        if not chunk:
            break
        line += chunk
    return line


def _forget_in_child() -> None:
    """Closes the pipes in a forked child, which must not keep its parent's coordinator running."""
    for pipe in _pipes.values():
        os.close(pipe)
    _pipes.clear()


def _announce_exit() -> None:
    for pipe in _pipes.values():
        if _is_running(pipe):  # else SIGPIPE would end a process that does not ignore it
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, b".")
        os.close(pipe)
    _pipes.clear()


os.register_at_fork(after_in_child=_forget_in_child)
