"""`ferrorpc coordinator`: executes the coordinator service, a separate program, in this process."""

from __future__ import annotations

import os
import sys

import click


@click.command("coordinator", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run the coordinator service until it is stopped (SIGTERM drains it). All options are passed to the service."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    if sys.stdout is not None:
        sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ferrorpc_coordinator", *arguments])
