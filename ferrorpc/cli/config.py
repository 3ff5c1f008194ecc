"""`ferrorpc config`: every setting, its value and where the value came from."""

from __future__ import annotations

import json
import os

import click

from ferrorpc.cli.table import table
from ferrorpc.config import SETTINGS, Config, Setting, split_invalid
from ferrorpc.errors import ConfigError
from ferrorpc.exit_codes import EXIT_CONFIG


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def command(as_json: bool) -> int:
    """Show each setting's value and where it came from: a variable or the default.

    Exit code 64 if one has a wrong form. `ferrorpc doctor` looks at what they name, too.
    """
    environment, wrong = split_invalid(os.environ)
    config = Config(environment=environment)
    if as_json:
        click.echo(json.dumps({setting.name: _figures(setting, config, wrong) for setting in SETTINGS}, indent=2))
    else:
        click.echo(table(("variable", "value", "from", "meaning"), [_row(setting, config, wrong) for setting in SETTINGS]))
    for error in wrong.values():
        click.echo(f"ferrorpc: {error.message}", err=True)
    if wrong:
        click.echo(f"try: correct or unset {', '.join(wrong)}", err=True)
    return EXIT_CONFIG if wrong else 0


def _figures(setting: Setting, config: Config, wrong: dict[str, ConfigError]) -> dict[str, object]:
    variable = setting.variable
    if variable in wrong:
        return {"value": os.environ[variable], "source": variable, "variable": variable, "error": wrong[variable].message}
    return {"value": config[setting.name], "source": config.source(setting.name), "variable": variable}


def _row(setting: Setting, config: Config, wrong: dict[str, ConfigError]) -> tuple[str, ...]:
    variable = setting.variable
    if variable in wrong:
        return variable, os.environ[variable], f"{variable} (WRONG)", setting.help
    return variable, _shown(config[setting.name]), config.source(setting.name), setting.help


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)
