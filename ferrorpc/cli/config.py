"""`ferrorpc config`: every setting, its value here and where that came from."""

from __future__ import annotations

import json

import click

from ferrorpc.cli.table import table
from ferrorpc.config import SETTINGS, Config


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def command(as_json: bool) -> None:
    """Show each setting's value and where it came from: a variable, or the default."""
    config = Config()
    if as_json:
        found = {s.name: {"value": config[s.name], "source": config.source(s.name), "variable": s.variable} for s in SETTINGS}
        click.echo(json.dumps(found, indent=2))
        return
    rows = [(s.variable, _shown(config[s.name]), config.source(s.name), s.help) for s in SETTINGS]
    click.echo(table(("variable", "value", "from", "meaning"), rows))


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)
