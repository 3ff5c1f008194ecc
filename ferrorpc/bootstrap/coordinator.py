"""The coordinator that rank 0 starts where a launcher gives ranks but nobody runs one."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from ferrorpc.bootstrap.coordinator_watchdog import LINGER_SECONDS
from ferrorpc.config import Config
from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import is_loopback, join_address, split_address

START_SECONDS: Final = 30.0
PORT_SECONDS: Final = LINGER_SECONDS + 3.0
"""How long the port may be taken: the coordinator of a run that has just ended is given up by its keeper within that time."""
_LOOK_SECONDS: Final = 0.1
_FLAGS: Final = (
    "lease",
    "grace",
    "stall",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "token_file",
    "cost_table",
    "log_level",
    "log_format",
)
_log = logging.getLogger("ferrorpc.bootstrap")
_running: dict[str, int] = {}
"""Address -> the pipe whose end tells the keeper that this process has ended; a byte in it, that it ended in good order."""


def start_coordinator(address: str, config: Config, environment: Mapping[str, str]) -> None:
    """Starts a coordinator on `address` and waits until it listens. One that this process started before is kept, if it lives.

    It listens on loopback when `address` is there, and else on the setting `bind`. It ends soon after this process, however
    that ends.

    Raises:
        ConfigError: it could not start; its own words are on standard error.
    """
    if address in _running:
        if _is_watched(_running[address]):
            return
        os.close(_running.pop(address))
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
    announced, lifeline, process = _spawn(["--listen", listen, *_flags(config)], environment)
    try:
        ready = _first_line(announced)
    finally:
        os.close(announced)
    if ready.startswith(b"listening"):
        _running[address] = lifeline
        return
    os.close(lifeline)
    _, status = os.waitpid(process, 0)
    raise ConfigError(
        f"rank 0 could not start a coordinator on {listen} (exit code {os.waitstatus_to_exitcode(status)})",
        hint="read its message above; where another run has the port, give each run a FERRORPC_PORT of its own, such as "
        "$((20000 + SLURM_JOB_ID % 10000)), or name a coordinator that runs",
    )


def _is_watched(lifeline: int) -> bool:
    """Whether the keeper at the other end is there, as it is while the coordinator lives."""
    end = select.poll()
    end.register(lifeline, 0)
    return not end.poll(0)


def _await_port(listen: str) -> None:
    """Returns once nobody listens there, or after PORT_SECONDS: launchers start ranks again sooner than a coordinator ends."""
    host, port = split_address(listen)
    until = time.monotonic() + PORT_SECONDS
    told = False
    while _is_taken(host, port) and time.monotonic() < until:
        if not told:
            told = True
            _log.warning("%s is taken: if by the coordinator of a run before, it ends within %g s", listen, PORT_SECONDS)
        time.sleep(_LOOK_SECONDS)


def _is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there. What else is wrong with the address, the coordinator will say."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_bound(family, address) for family, _, _, _, address in found)


def _is_bound(family: socket.AddressFamily, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _spawn(arguments: list[str], environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Starts the keeper in a session of its own, so that Ctrl-C does not reach it.

    Returns:
        The descriptor its ready line comes from, the one it watches for this process's end, and its process id.
    """
    announced, announcing = os.pipe()
    watched, lifeline = os.pipe()
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", "ferrorpc.bootstrap.coordinator_watchdog", *arguments],
        dict(environment),
        file_actions=[(os.POSIX_SPAWN_DUP2, watched, 0), (os.POSIX_SPAWN_DUP2, announcing, 1)],
        setsid=True,
    )
    os.close(announcing)
    os.close(watched)
    return announced, lifeline, process


def _first_line(descriptor: int) -> bytes:
    """The first line that is written there; what there is of it at its end, or after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(descriptor, 1) if ready else b""
        if not chunk:
            break
        line += chunk
    return line


def _flags(config: Config) -> list[str]:
    """Settings that came as arguments; those of the environment are inherited."""
    flags: list[str] = []
    for name in _FLAGS:
        if config.source(name) == "argument":
            flags += [f"--{name.replace('_', '-')}", str(config[name])]
    return [*flags, "--insecure"] if config["insecure"] else flags


def _forget_in_child() -> None:
    """A forked child must not keep the coordinator of a parent that ended."""
    for lifeline in _running.values():
        os.close(lifeline)
    _running.clear()


def _end_in_good_order() -> None:
    for lifeline in _running.values():
        with contextlib.suppress(BrokenPipeError):
            os.write(lifeline, b".")
        os.close(lifeline)
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end_in_good_order)
