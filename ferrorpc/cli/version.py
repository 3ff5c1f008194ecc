"""`ferrorpc version`: the versions that belong into a bug report."""

from __future__ import annotations

import platform

import click

from ferrorpc.cli.table import table
from ferrorpc.versions import own_version, version_of

_PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "cupy-cuda12x", "nvidia-nccl-cu12")


@click.command("version")
@click.option("-v", "--verbose", is_flag=True, help="Also the interpreter, the system and the packages it works with.")
def command(verbose: bool) -> None:
    """Show the version of ferrorpc; with -v, also the versions of what it depends on."""
    if not verbose:
        click.echo(own_version())
        return
    rows = [("ferrorpc", own_version()), *((name, version_of(name) or "not installed") for name in _PACKAGES)]
    rows += [("python", platform.python_version()), ("system", platform.platform())]
    click.echo(table(("component", "version"), rows))
