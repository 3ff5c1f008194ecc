"""`ferrorpc bench`: the group of all measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from ferrorpc.cli.lazy_group import Entry, LazyGroup

MEASUREMENTS: Final = {
    "all_reduce": Entry("ferrorpc.cli.bench.all_reduce", "all_reduce, size by size, compared with Gloo and MPICH."),
    "rendezvous": Entry("ferrorpc.cli.bench.rendezvous", "Many members joining one round."),
    "barrier": Entry("ferrorpc.cli.bench.barrier", "Named barriers of many members."),
}
FIRST: Final = "all_reduce"
"""The measurement run for `--json` without a command."""


@click.pass_context
def _measure(context: click.Context, fit: Path | None, ranks: str, as_json: bool) -> Any:
    """Handles the options of the group itself."""
    if fit is not None:
        if context.invoked_subcommand is not None or as_json:
            raise click.UsageError("--fit is a separate measurement: leave out --json and other measurements")
        _fit(fit, ranks)
    elif context.get_parameter_source("ranks") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--ranks says what --fit FILE measures; measurements have options of their own")
    elif not as_json:
        if context.invoked_subcommand is None:
            click.echo(context.get_help())
    elif context.invoked_subcommand is None:
        chosen = command.get_command(context, FIRST)
        assert chosen is not None
        return context.invoke(chosen, as_json=True)
    else:
        context.default_map = {name: {"as_json": True} for name in MEASUREMENTS}
    return None


def _fit(fit: Path, ranks: str) -> None:
    if not os.access(fit.absolute().parent, os.W_OK):
        raise click.BadParameter(f"the directory of {fit} is not writable", param_hint="--fit")
    from ferrorpc.cli.bench.fit import cases, measure, table_of
    from ferrorpc.wire.cost_table import LANE

    if not all(part.strip().isdecimal() and int(part) >= 2 for part in ranks.split(",")):
        raise click.BadParameter("expected numbers of ranks of at least 2, separated by commas", param_hint="--ranks")
    table = table_of(measure({each: cases() for each in sorted({int(part) for part in ranks.split(",")})}))
    fit.write_text(table.text(), encoding="utf-8")
    for count, costs in table.rows.items():
        click.echo(f"{LANE}, {count} ranks: {costs}")
    click.echo(f"written to {fit}; a coordinator publishes it with --cost-table {fit}")


command = LazyGroup(
    MEASUREMENTS,
    name="bench",
    help="Measure on this machine, beside comparable systems if they are installed. Each command takes --json.",
    invoke_without_command=True,
    callback=_measure,
    params=[
        click.Option(
            ["--fit"],
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            help="Measure the cost of messages and reductions between processes here, and write the cost table to this file.",
        ),
        click.Option(["--ranks"], default="2,4", show_default=True, help="With --fit: the numbers of ranks to measure."),
        click.Option(["--json", "as_json"], is_flag=True, help=f"Print JSON; without a command, of {FIRST}."),
    ],
)
