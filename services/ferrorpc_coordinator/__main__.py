"""The coordinator's process: `python -m ferrorpc_coordinator --listen 127.0.0.1:29700 --data-dir DIR`.

When it is ready it writes one line to stdout: `listening HOST:PORT cluster CLUSTER_ID`, followed by ` http HOST:PORT` if it has
an HTTP port. At SIGTERM, SIGINT or SIGHUP it drains and exits with code 0.
Exit code 64: invalid configuration. 70: it failed; with a data directory, a restart loses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from ferrorpc_coordinator import grpc_verbosity  # noqa: F401 (must be the first import)

# isort: split
from ferrorpc.config import SETTINGS, Config, Setting
from ferrorpc.errors import ConfigError
from ferrorpc.exit_codes import CONFIGURATION_ERRORS, EXIT_CONFIG, EXIT_FAILED, EXIT_RETRY
from ferrorpc.logs import set_up_logging
from ferrorpc.versions import own_version
from ferrorpc.wire.cost_table import read
from ferrorpc.wire.identity import Role, described
from ferrorpc.wire.tls import TlsFiles
from ferrorpc_coordinator.server import Announcement, Options, serve
from ferrorpc_coordinator.state.settings import SECOND, Settings
from ferrorpc_coordinator.tokens import read_token_file

_METAVARS: Final = {
    "listen": "HOST:PORT",
    "data_dir": "DIR",
    "http_port": "PORT",
    "cost_table": "FILE",
    "heartbeat_interval": "SECONDS",
    "lease": "SECONDS",
    "grace": "SECONDS",
    "stall": "SECONDS",
    "tls_ca": "FILE",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "token_file": "FILE",
    "insecure": "",
    "log_level": "LEVEL",
    "log_format": "FORMAT",
}
"""The settings with a flag, each with what stands for its value in the help; nothing for one that has no value."""
_PROCESS_FLAGS: Final = ("starter_fd", "transient")
"""Flags that are no settings: they are for who starts this process."""
logger = logging.getLogger("ferrorpc.coordinator")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a coordinator; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        config = Config({name: value for name, value in vars(arguments).items() if name not in _PROCESS_FLAGS})
        set_up_logging(config)
        _raise_descriptor_limit()
        # A directory that a user set for a transient one comes by its variable.
        dispensable = arguments.transient and hasattr(arguments, "data_dir")
        options = replace(options_from(config), dispensable=dispensable, starter_fd=arguments.starter_fd)
        _require_role(options.tls)
        forgets = options.data_dir is None and not arguments.transient
        asyncio.run(serve(options, lambda announcement: _announce(announcement, forgets)))
    except CONFIGURATION_ERRORS as error:
        sys.stderr.write(f"ferrorpc coordinator: {error}\n")
        return EXIT_RETRY if error.retryable else EXIT_CONFIG
    except Exception:
        logger.exception("the coordinator failed; what it acknowledged is in its data directory, if it has one")
        return EXIT_FAILED
    return 0


def options_from(config: Config) -> Options:
    """The coordinator's options from the settings.

    Raises:
        ConfigError: they contradict each other, or a file they name cannot be read.
    """
    data_dir = config["data_dir"]
    token_file = None if config["token_file"] is None else Path(config["token_file"])
    return Options(
        listen=config["listen"],
        settings=Settings(
            lease_ns=round(config["lease"] * SECOND),
            grace_ns=round(config["grace"] * SECOND),
            stall_ns=round(config["stall"] * SECOND),
            heartbeat_ns=round(config["heartbeat_interval"] * SECOND),
            version=own_version(),
            cost_table=_cost_table(config["cost_table"]),
        ),
        data_dir=None if data_dir is None else Path(data_dir),
        tls=_tls(config),
        grants=() if token_file is None else read_token_file(token_file),
        token_file=token_file,
        insecure=config["insecure"],
        http_port=config["http_port"],
    )


def _raise_descriptor_limit() -> None:
    """Raises the limit of file descriptors to the maximum: each member needs one, and the usual limit is 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_CONFIG, f"{self.prog}: {message}\ntry: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ferrorpc coordinator",
        description="Decides who is in a job, gives out ranks, holds barriers and keeps small shared values.",
        epilog="Each flag has a variable: --data-dir is FERRORPC_DATA_DIR. `ferrorpc config` shows them all.",
        argument_default=argparse.SUPPRESS,
    )
    for setting in SETTINGS:
        if setting.name in _METAVARS:
            metavar = _METAVARS[setting.name]
            form: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
            parser.add_argument(f"--{setting.name.replace('_', '-')}", help=_help(setting), **form)
    parser.add_argument(
        "--transient",
        action="store_true",
        default=False,
        help="for one that ends with its job: no warning that nothing is kept; without room for a new --data-dir it has none",
    )
    parser.add_argument(
        "--starter-fd",
        metavar="N",
        type=int,
        default=None,
        help="end soon after the process that holds the other end of this pipe, or, where a byte came first, after all members",
    )
    return parser


def _help(setting: Setting) -> str:
    choices = f": {', '.join(setting.choices)}" if setting.choices else ""
    default = f" (default {setting.default})" if setting.default else ""
    return f"{setting.help}{choices}{default}"


def _announce(announcement: Announcement, forgets: bool) -> None:
    http = f" http {announcement.http_address}" if announcement.http_address else ""
    line = f"listening {announcement.address} cluster {announcement.cluster_id}{http}\n"
    try:
        if sys.stdout is not None:  # the process may have no stdout
            sys.stdout.write(line)
            sys.stdout.flush()
    except OSError as error:  # its reader is gone, or its disk is full: serve anyway
        logger.warning("%s (could not be announced: %s)", line.strip(), error.strerror)
    page = f"; status page at {announcement.page}" if announcement.page else ""
    logger.info("epoch %d%s", announcement.epoch, page)
    if forgets:
        logger.warning("everything is kept in memory: without --data-dir a restart forgets it")


def _tls(config: Config) -> TlsFiles | None:
    tls = TlsFiles.of(config)
    if tls is not None and tls.certificate is None:
        raise ConfigError(
            "a certificate authority without FERRORPC_TLS_CERT and FERRORPC_TLS_KEY protects nothing",
            hint="give all three; `ferrorpc certs init` makes them",
        )
    return tls


def _require_role(tls: TlsFiles | None) -> None:
    """Raises ConfigError if the certificate is that of another role, whose holder members would not take for a coordinator."""
    found = tls.check(listening=True) if tls is not None and tls.authority is not None else frozenset()
    if found and not any(identity.role is Role.COORDINATOR for identity in found):
        raise ConfigError(
            f"FERRORPC_TLS_CERT is the certificate of {described(found)}: members would refuse a coordinator that shows it",
            hint="start `ferrorpc coordinator` with coordinator.pem and coordinator.key, and name it in FERRORPC_COORDINATOR; "
            "one that a launcher or rank 0 starts has the workers' settings",
        )


def _cost_table(path: str | None) -> str:
    """The cost table in this file as compact JSON; empty without one."""
    return "" if path is None else json.dumps(json.loads(read(path).text()), separators=(",", ":"))


if __name__ == "__main__":
    gc.freeze()  # what was imported stays: no search for garbage looks at it, nor does the one at the end
    sys.exit(main())
