"""`ferrorpc version`: the versions that belong into a bug report."""

from __future__ import annotations

import platform

import click

from ferrorpc.cli.table import table
from ferrorpc.versions import own_version, version_of

_PACKAGES = (
    ("grpcio",),
    ("protobuf",),
    ("numpy",),
    ("torch",),
    ("cupy-cuda12x", "cupy-cuda13x"),
    ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
"""Distributions, of each row one or more."""


@click.command("version")
@click.option("-v", "--verbose", is_flag=True, help="Also the interpreter, the system and the packages it works with.")
def command(verbose: bool) -> None:
    """Show the version of ferrorpc; with -v, also the versions of what it depends on."""
    if not verbose:
        click.echo(own_version())
        return
    rows = [("ferrorpc", own_version())]
    for names in _PACKAGES:
        found = [(name, version) for name in names if (version := version_of(name))]
        rows += found or [(" or ".join(names), "not installed")]
    rows += [("python", platform.python_version()), ("system", platform.platform())]
    click.echo(table(("component", "version"), rows))
