"""`ferrorpc bench all_reduce`: compares ferrorpc's transports with Gloo and MPICH, size by size, in turns.

`benchmarks/compare.py` measures more in the same way, and compares the results with targets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import click

from ferrorpc.cli.bench import machine, report
from ferrorpc.cli.bench.case import ALL_REDUCE, GLOO, ITEM_BYTES, MPICH, REGISTERED, Case, Contender, ferrorpc_system
from ferrorpc.cli.bench.comparison import Comparison
from ferrorpc.cli.parameters import Seconds
from ferrorpc.cli.system import require_linux
from ferrorpc.config import SETTINGS, size_bytes

SIZES: Final = "64,1KiB,64KiB,1MiB,16MiB"
TRANSPORTS: Final = "shared_memory,grpc"
KNOWN: Final = next(setting.choices for setting in SETTINGS if setting.name == "transport")
PEERS: Final = (GLOO, MPICH)


@click.command("all_reduce")
@click.option("-n", "--nproc", "processes", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option("--sizes", default=SIZES, show_default=True, help="Bytes of float32, separated by commas.")
@click.option("--seconds", type=Seconds(min=0.001, max=3600.0), default=0.2, show_default=True, help="Length of a turn.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each system at each size.")
@click.option("--transports", default=TRANSPORTS, show_default=True, help="Transports of ferrorpc, separated by commas.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also measure Gloo and MPICH, if installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(processes: int, sizes: str, seconds: float, rounds: int, transports: str, peers: bool, as_json: bool) -> int:
    """Compare in-place sums on this machine.

    The systems take turns while the others are blocked. A time is that of the slowest rank. The table shows the median of all
    blocks of repetitions, CPU seconds of all ranks together, and memory beyond the arrays. Results are verified.
    """
    try:
        counts = [size_bytes(size) for size in sizes.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sizes") from None
    if min(counts) < ITEM_BYTES["float32"]:
        raise click.BadParameter("expected at least the 4 bytes of a float32", param_hint="--sizes")
    names = transports.split(",")
    if not set(names) <= set(KNOWN):
        raise click.BadParameter(f"expected some of {', '.join(KNOWN)}, separated by commas", param_hint="--transports")
    results = run(processes, counts, names, seconds=seconds, rounds=rounds, peers=peers, quiet=as_json)
    click.echo(json.dumps(results) if as_json else describe(results))
    ours = [contender.label for contender in contenders(names)]
    return 0 if any("median_seconds" in row["results"][label] for row in results["rows"] for label in ours) else 1


def contenders(transports: Sequence[str], *, peers: bool = False) -> list[Contender]:
    """Each transport with ordinary arrays, and with registered ones if it can map memory; then the peers."""
    found = []
    for transport in transports:
        system = ferrorpc_system(transport)
        found.append(Contender(system))
        if transport != "grpc":
            found.append(Contender(system, REGISTERED))
    return [*found, *(Contender(peer) for peer in PEERS if peers)]


def run(
    processes: int,
    sizes_bytes: Sequence[int],
    transports: Sequence[str],
    *,
    seconds: float,
    rounds: int,
    peers: bool,
    quiet: bool = True,
) -> dict[str, Any]:
    """Measures all sizes.

    Returns:
        {"machine": {...}, "loads": [...], "rows": [{"case": {...}, "results": {label: {"median_seconds", ...}}}]}.

    Raises:
        ConfigError: this is not Linux.
    """
    require_linux("a comparison of processes that take turns", "measure within a script of your own")
    comparison = Comparison(seconds=seconds, rounds=rounds, note=(lambda _: None) if quiet else partial(click.echo, err=True))
    facts = machine.describe()
    rows = comparison.run([Case(ALL_REDUCE, processes, size) for size in sizes_bytes], contenders(transports, peers=peers))
    return {"machine": facts, "loads": comparison.loads, "rows": rows}


def describe(results: dict[str, Any]) -> str:
    """The results as a table, with a line about the machine."""
    facts = machine.line(results["machine"], results["loads"])
    return f"{report.describe(results['rows'], [peer.name for peer in PEERS])}\n{facts}"
