"""`ferrorpc plan all_reduce` and the other collectives: what each rank does, how long it takes, and the alternatives.

The output begins with the lines that `group.explain` returns for such a group. Its figures come from simulating every chunk,
while `explain` uses a closed form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from ferrorpc.cli.table import table
from ferrorpc.collectives.algorithms.algorithm import Algorithm
from ferrorpc.collectives.algorithms.plan import Action
from ferrorpc.collectives.arena.select import explain as explain_in_memory
from ferrorpc.collectives.call import Call, Operation, example, in_ranks
from ferrorpc.collectives.predict import Prediction, predict
from ferrorpc.collectives.select import explain, select
from ferrorpc.collectives.tuning import Tuning, algorithm_names, parse_algorithms
from ferrorpc.config import Config, size_bytes
from ferrorpc.wire.cost_table import read

FILE: Final = click.Path(dir_okay=False, path_type=Path)
STEPS_SHOWN: Final = 32
RANKS_MAX: Final = 100_000
"""Ten times the members that a job may have. Plans of so many ranks still take only seconds."""
_WORDS: Final = {
    "Send": "send {0.region} to rank {0.peer}",
    "Receive": "receive {0.region} from rank {0.peer}",
    "Fold": "fold what rank {0.peer} sent into {0.region}",
    "FoldUnder": "fold what rank {0.peer} sent into {0.region} (as the left operand)",
    "FoldOwn": "fold {0.source} into {0.region}",
    "Quantise": "round {0.region} as its receivers do",
    "Load": "load {0.source} into {0.region}",
    "Finish": "finish {0.source} as {0.region}",
    "Copy": "copy {0.source} to {0.region}",
}


def command_of(operation: Operation) -> click.Command:
    """The command that plans one operation."""
    names = ", ".join(algorithm_names(operation))

    told = f"Show what {operation.value} does on every rank, and what it would cost."

    @click.command(operation.value, help=told, short_help=f"What {operation.value} does, and its cost.")
    @click.option("--algorithm", help=f"One of {names}. Without it, what would be chosen.")
    @click.option("--ranks", type=click.IntRange(1, RANKS_MAX), default=8, show_default=True, help="Ranks of the group.")
    @click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="Hosts that the ranks are spread over.")
    @_sized(operation)
    @click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="The rank whose steps are listed.")
    @click.option("--cost-table", help="A file that `ferrorpc bench --fit` wrote; default the setting's, or the packaged one.")
    @click.option("--svg", type=FILE, help="Draw what each rank does when into this file.")
    @click.option("--png", type=FILE, help="The same as PNG (needs matplotlib).")
    @click.option("--trace", type=FILE, help="Write a trace for chrome://tracing and Perfetto.")
    @click.option("--json", "as_json", is_flag=True, help="Figures as one JSON object.")
    def planned(
        algorithm: str | None,
        ranks: int,
        hosts: int,
        rank: int,
        cost_table: str | None,
        svg: Path | None,
        png: Path | None,
        trace: Path | None,
        as_json: bool,
        size: str = "0",
    ) -> None:
        if rank >= ranks:
            raise click.BadParameter(f"there are ranks 0 to {ranks - 1}", param_hint="--rank")
        if hosts > ranks:
            raise click.BadParameter(f"{ranks} ranks cannot be spread over {hosts} hosts", param_hint="--hosts")
        layout = tuple(each * hosts // ranks for each in range(ranks))
        config = Config({"cost_table": cost_table})
        file, asked = config["cost_table"], parse_algorithms(config["algorithm"] or (), config.source("algorithm"))
        tuning = Tuning(None if file is None else read(file), asked, layout)
        plan = _PlannedCall(replace(example(operation.value, _bytes(size), ranks), algorithm=algorithm), ranks, size, tuning)
        if svg or png or trace:
            timeline = plan.prediction.timeline(plan.title)
            for path, write in ((svg, timeline.to_svg), (png, timeline.to_png), (trace, timeline.to_chrome_trace)):
                if path:
                    write(path)
        click.echo(json.dumps(plan.figures(), indent=2) if as_json else plan.shown(rank))

    return planned


def _sized(operation: Operation) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option --size; none for a barrier, which moves nothing."""
    if operation is Operation.BARRIER:
        return lambda body: body
    return click.option("--size", default="16MiB", show_default=True, help="Bytes of float32 that each rank contributes.")


def _bytes(size: str) -> int:
    try:
        return size_bytes(size)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--size") from None


class _PlannedCall:
    """One call, its chosen algorithm, and the alternatives."""

    def __init__(self, call: Call, ranks: int, size: str, tuning: Tuning) -> None:
        self.given, self.call, self.ranks, self.tuning = call, tuning.applied(call), ranks, tuning
        self.chosen = select(self.call, ranks, tuning)
        hosts, where = len(set(tuning.hosts)), in_ranks(ranks)
        if call.operation is not Operation.BARRIER:
            where = f"{size} on {where}"
        self.title = f"{call.operation.value} by {self.chosen.name}, {where}"
        self.heading = f"{call.operation.value}, {where} of {hosts} host{'s' * (hosts > 1)}"
        shares = hosts == 1 < ranks and Config()["transport"] != "grpc"
        self.in_memory = explain_in_memory(self.call, ranks) if shares else None
        """How it runs in shared memory, which ranks of one host use by default; None if it runs as messages."""
        costs = tuning.costs(ranks)
        self.predictions: list[tuple[Algorithm, Prediction]] = [
            (entry, predict(entry, call, ranks, costs)) for entry in tuning.algorithms_of(call.operation)
        ]
        self.predictions.sort(key=lambda each: each[1].seconds)
        self.prediction = next(found for entry, found in self.predictions if entry.name == self.chosen.name)

    def shown(self, rank: int) -> str:
        """As text."""
        actions = self._actions(rank)
        rows = [(str(place), _WORDS[type(each).__name__].format(each)) for place, each in enumerate(actions[:STEPS_SHOWN])]
        more = [f"... and {len(actions) - STEPS_SHOWN} more"] if len(actions) > STEPS_SHOWN else []
        steps = table(("step", f"rank {rank} does, in elements of its arrays"), rows, right=frozenset({"step"}))
        shared = [self.in_memory, "as messages it would be:"] if self.in_memory else []
        choice = explain(self.given, self.ranks, self.tuning).splitlines()[:2]
        return "\n".join([self.heading, *shared, *choice, "", steps, *more, "", self._alternatives()])

    def _actions(self, rank: int) -> tuple[Action, ...]:
        call = self.call
        if call.operation is Operation.SCATTER and rank != call.root:
            call = replace(call, inputs=())
        return self.chosen.build(call, rank, self.ranks).actions

    def _alternatives(self) -> str:
        header = ("", "algorithm", "predicted", "messages", "MB sent", "order of summation")
        rows = [
            (
                "*" if entry.name == self.chosen.name else "",
                entry.name,
                f"{found.seconds * 1e3:,.3f} ms" + ("" if found.steps else " (closed form)"),
                f"{found.messages:g}",
                f"{found.sent_bytes / 1e6:,.3f}",
                entry.order.value,
            )
            for entry, found in self.predictions
        ]
        text = table(header, rows, right=frozenset({"predicted", "messages", "MB sent"}))
        return f"{text}\n*  the chosen one, whose steps are above; messages and MB are those of the busiest rank"

    def figures(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "operation": self.call.operation.value,
            "ranks": self.ranks,
            "algorithm": self.chosen.name,
            "in_memory": self.in_memory,
            "cost_table": self.tuning.table.name,
            "algorithms": [
                {
                    "algorithm": entry.name,
                    "order": entry.order.value,
                    "seconds": found.seconds,
                    "followed": found.steps is not None,
                    "messages": found.messages,
                    "sent_bytes": found.sent_bytes,
                }
                for entry, found in self.predictions
            ],
        }


COMMANDS: Final = tuple(command_of(operation) for operation in Operation)
"""One for each collective."""
