"""`ferrorpc version`: what a bug report should begin with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from ferrorpc.cli.table import table

_PACKAGES = ("ferrorpc", "grpcio", "protobuf", "numpy", "torch", "cupy-cuda12x", "nvidia-nccl-cu12")


@click.command("version")
@click.option("-v", "--verbose", is_flag=True, help="Also the interpreter, the system and the packages it works with.")
def command(verbose: bool) -> None:
    """Show the versions of ferrorpc and of what it stands on."""
    if not verbose:
        click.echo(_installed("ferrorpc"))
        return
    rows = [(name, _installed(name)) for name in _PACKAGES]
    rows += [("python", platform.python_version()), ("system", platform.platform())]
    click.echo(table(("component", "version"), rows))


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
