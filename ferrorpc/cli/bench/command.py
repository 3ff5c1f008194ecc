"""`ferrorpc bench`: the group of all measurements."""

from __future__ import annotations

from typing import Final

from ferrorpc.cli.lazy import Entry, LazyGroup

MEASUREMENTS: Final = {
    "all_reduce": Entry("ferrorpc.cli.bench.all_reduce", "all_reduce, size by size, beside Gloo and MPICH."),
    "rendezvous": Entry("ferrorpc.cli.bench.rendezvous", "Many members joining one round."),
    "barrier": Entry("ferrorpc.cli.bench.barrier", "Named barriers of many members."),
}

command = LazyGroup(
    MEASUREMENTS,
    name="bench",
    help="Measure on this machine. Each takes --json, and runs its counterparts beside it where they are installed.",
    no_args_is_help=True,
)
