"""`ferrorpc coordinator`: becomes the coordinator service, which is a program of its own."""

from __future__ import annotations

import os
import sys

import click


@click.command("coordinator", context_settings={"ignore_unknown_options": True})
@click.option("--listen", metavar="HOST:PORT", help="Default 127.0.0.1:29700; port 0 takes a free one.")
@click.option("--data-dir", metavar="DIR", help="Keep the journal there; without one a restart is a new cluster.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF python -m ferrorpc_coordinator]")
def command(listen: str | None, data_dir: str | None, more: tuple[str, ...]) -> None:
    """Run the coordinator service until it is told to stop (SIGTERM drains it).

    `python -m ferrorpc_coordinator --help` shows every option; all of them can be given here.
    """
    arguments = [sys.executable, "-P", "-m", "ferrorpc_coordinator"]
    for flag, value in (("--listen", listen), ("--data-dir", data_dir)):
        arguments += [] if value is None else [flag, value]
    arguments += more
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    sys.stdout.flush()
    os.execv(sys.executable, arguments)
