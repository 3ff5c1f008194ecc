"""`ferrorpc plan`: what a plan would do and cost, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from ferrorpc.cli.plan_collective import COMMANDS, FILE
from ferrorpc.cli.table import table
from ferrorpc.errors import ConfigError, UsageError
from ferrorpc.pipeline import schedules
from ferrorpc.pipeline.schedules import PipelineTimeline, Schedule
from ferrorpc.pipeline.schedules.simulation import columns

COUNT = click.IntRange(min=1)
TIME = click.FloatRange(min=0)
LARGE: Final = 1_000
"""From this number of forward passes in total, schedules take seconds to a minute each, and are named as they begin."""
STAGES_MAX: Final = 1_000
PASSES_MAX: Final = 100_000
"""Forward passes in total, which take up to a minute for each schedule."""


class _Plans(click.Group):
    """Counts and names that no plan has are wrong arguments of the command line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise ConfigError(error.message, hint=error.hint) from None


@click.group("plan", cls=_Plans)
def command() -> None:
    """Show what a plan would do and cost, before anything runs."""


for _collective in COMMANDS:
    command.add_command(_collective)


@command.command("pipeline", short_help="A pipeline schedule, or all of them compared.")
@click.option("--schedule", "name", help=f"One of {', '.join(schedules.NAMED)}. Without it, all of them are compared.")
@click.option("--from-csv", "source", type=FILE, help="Read the schedule from a CSV file instead.")
@click.option("--stages", type=click.IntRange(1, STAGES_MAX), default=4, show_default=True, help="Ranks of the pipeline.")
@click.option("--microbatches", type=COUNT, default=8, show_default=True, help="Parts of a batch.")
@click.option("--chunks", type=COUNT, help="Pieces of the model on each rank, where the schedule allows a choice.")
@click.option("--forward", type=TIME, default=1.0, show_default=True, help="Time units of a whole rank's forward.")
@click.option("--backward-input", type=TIME, default=1.0, show_default=True, help="Of its backward for the input.")
@click.option("--backward-weight", type=TIME, default=1.0, show_default=True, help="Of its backward for the weights.")
@click.option("--latency", type=TIME, default=0.0, show_default=True, help="Of a message between two ranks.")
@click.option("--transfer", type=TIME, default=0.0, show_default=True, help="How long a message occupies its link.")
@click.option("--svg", type=FILE, help="Draw the timeline into this file.")
@click.option("--png", type=FILE, help="The same as PNG (needs matplotlib).")
@click.option("--trace", type=FILE, help="Write a trace for chrome://tracing and Perfetto.")
@click.option("--csv", "target", type=FILE, help="Write the schedule as CSV, as torch.distributed.pipelining reads it.")
@click.option("--json", "as_json", is_flag=True, help="Figures as one JSON object.")
@click.pass_context
def pipeline(
    context: click.Context,
    /,
    name: str | None,
    source: Path | None,
    stages: int,
    microbatches: int,
    chunks: int | None,
    forward: float,
    backward_input: float,
    backward_weight: float,
    latency: float,
    transfer: float,
    svg: Path | None,
    png: Path | None,
    trace: Path | None,
    target: Path | None,
    as_json: bool,
) -> None:
    """Show a pipeline schedule: what each rank does when, how long it idles, how many activations it holds."""
    costs = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    costs |= {"latency": latency, "transfer": transfer}
    if source is not None:
        _refuse_what_the_file_says(context)
        schedule = Schedule.from_csv(source, source.stem)
        _announce(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks)
    else:
        _refuse_too_many(stages, microbatches, chunks or 1)
        if name is None:
            if any((svg, png, trace, target)):
                raise click.UsageError("files show one schedule: name it with --schedule")
            _compare(stages, microbatches, chunks, costs, as_json)
            return
        _announce(name, stages, microbatches, chunks)
        schedule = schedules.named(name, stages, microbatches, chunks)
    timeline = schedule.simulate(**costs)
    writers = ((svg, timeline.to_svg), (png, timeline.to_png), (trace, timeline.to_chrome_trace), (target, schedule.to_csv))
    for path, write in writers:
        if path:
            write(path)
    click.echo(json.dumps(_figures(schedule, timeline), indent=2) if as_json else _shown(schedule, timeline))


def _refuse_too_many(stages: int, microbatches: int, chunks: int) -> None:
    passes = stages * microbatches * chunks
    if passes > PASSES_MAX:
        counts = f"{stages} stages, {microbatches} microbatches and {chunks} pieces a rank"
        raise click.UsageError(f"{counts} are {passes} forward passes; at most {PASSES_MAX} can be shown: ask for fewer")


def _refuse_what_the_file_says(context: click.Context) -> None:
    """Refuses options beside --from-csv that say what the file says already."""
    if context.get_parameter_source("name") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--schedule and --from-csv each name a schedule: give one of them")
    for option in ("stages", "microbatches", "chunks"):
        if context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"the file of --from-csv says how many {option} there are: leave out --{option}")


def _shown(schedule: Schedule, timeline: PipelineTimeline) -> str:
    """The schedule as a grid with a column per time slot, and its figures below."""
    cells = columns(schedule)
    width = max(len(cell) for row in cells for cell in row)
    grid = [f"rank {rank}  " + " ".join((cell or ".").ljust(width) for cell in row).rstrip() for rank, row in enumerate(cells)]
    rows = [
        (
            str(rank),
            " ".join(str(piece) for piece in schedule.pieces(rank)),
            f"{timeline.busy[rank]:.6g}",
            f"{timeline.bubbles[rank]:.1%}",
            f"{timeline.peak_activations[rank]:g}",
        )
        for rank in range(schedule.stages)
    ]
    header = ("rank", "pieces", "busy", "idle", "peak activations")
    figures = table(header, rows, right=frozenset({"rank", "busy", "idle", "peak activations"}))
    return "\n".join([str(schedule), "", *grid, "", figures, "", timeline.summary()])


def _figures(schedule: Schedule, timeline: PipelineTimeline) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "bubbles": timeline.bubbles,
        "peak_activations": timeline.peak_activations,
    }


def _announce(name: str, stages: int, microbatches: int, chunks: float | None) -> None:
    """Says which schedule begins, where that takes long."""
    if stages * microbatches * (chunks or 1) >= LARGE:
        click.echo(f"{name}: {stages} stages, {microbatches} microbatches ...", err=True)


def _compare(stages: int, microbatches: int, chunks: int | None, costs: dict[str, float], as_json: bool) -> None:
    """Compares all named schedules at these costs, fastest first, and says why others do not support the counts."""
    found, refused = [], []
    for name in schedules.NAMED:
        _announce(name, stages, microbatches, chunks)
        try:
            schedule = schedules.named(name, stages, microbatches, chunks)
        except UsageError as error:
            refused.append((name, error.message))
        else:
            found.append(_figures(schedule, schedule.simulate(**costs)))
    found.sort(key=lambda figures: (figures["makespan"], max(figures["peak_activations"])))
    if as_json:
        click.echo(json.dumps({"schedules": found, "refused": dict(refused)}, indent=2))
        return
    header = ("schedule", "chunks", "makespan", "bubble", "peak activations")
    rows = [
        (
            str(figures["schedule"]),
            f"{figures['chunks']:g}",
            f"{figures['makespan']:.6g}",
            f"{figures['bubble_fraction']:.1%}",
            f"{max(figures['peak_activations']):g}",
        )
        for figures in found
    ]
    click.echo(table(header, rows, right=frozenset(header[1:])))
    for _, reason in refused:
        click.echo(f"not here: {reason}")
