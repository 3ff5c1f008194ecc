"""`ferrorpc bench all_reduce`: the time of one all_reduce, for several sizes, beside torch.distributed's Gloo."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from ferrorpc.cli.run import launch, make_plan
from ferrorpc.cli.table import table
from ferrorpc.config import size_bytes

SIZES: Final = ("4", "1KiB", "64KiB", "1MiB", "16MiB")
_WORKER: Final = "ferrorpc.cli.bench.all_reduce_worker"


@click.command("all_reduce")
@click.option("-n", "--nproc", "processes", type=click.IntRange(min=1), default=4, show_default=True, help="Processes.")
@click.option("--sizes", default=",".join(SIZES), show_default=True, help="Bytes of float32, separated by commas.")
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="About how long per size.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Measure torch's Gloo beside it, if installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(processes: int, sizes: str, seconds: float, peers: bool, as_json: bool) -> int:
    """Measure group.all_reduce over gRPC on this machine.

    A repetition's time is that of its slowest rank, from a common start; the table has the median of all repetitions.
    """
    try:
        counts = [size_bytes(size) for size in sizes.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sizes") from None
    results = run(processes, counts, seconds, peers=peers)
    click.echo(json.dumps(results) if as_json else describe(results))
    return max(int(lane["exit_code"]) for lane in results["lanes"].values())


def run(processes: int, sizes_bytes: list[int], seconds: float, *, peers: bool) -> dict[str, Any]:
    """Measures every lane.

    Returns:
        {"processes": n, "lanes": {lane: {"exit_code": 0, "sizes": [{"bytes", "repetitions", "median_seconds", ...}]}}}.
    """
    lanes = ["grpc", *(["gloo"] if peers and find_spec("torch") is not None else [])]
    return {"processes": processes, "lanes": {lane: _measure(lane, processes, sizes_bytes, seconds) for lane in lanes}}


def _measure(lane: str, processes: int, sizes_bytes: list[int], seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ferrorpc-bench-") as directory:
        out = Path(directory) / "results.json"
        arguments = (lane, str(out), str(seconds), *map(str, sizes_bytes))
        code = launch(make_plan(target=(_WORKER, *arguments), module=True, processes=str(processes), standalone=True))
        return {"exit_code": code, "sizes": json.loads(out.read_text()) if code == 0 else []}


def describe(results: dict[str, Any]) -> str:
    """The results as a table: a row a size, a column a lane."""
    lanes = results["lanes"]
    header = ("bytes", *(f"{lane} median" for lane in lanes), *(f"{lane} p90" for lane in lanes), "repetitions")
    columns = [lane["sizes"] for lane in lanes.values() if lane["sizes"]]
    rows = [
        (
            str(row[0]["bytes"]),
            *(_milliseconds(cell["median_seconds"]) for cell in row),
            *(_milliseconds(cell["p90_seconds"]) for cell in row),
            "/".join(str(cell["repetitions"]) for cell in row),
        )
        for row in zip(*columns, strict=True)
    ]
    failed = [f"{name} failed with exit code {lane['exit_code']}" for name, lane in lanes.items() if lane["exit_code"]]
    if failed:
        return "\n".join(failed)
    return f"all_reduce of float32 on {results['processes']} processes\n" + table(header, rows, right=frozenset(header))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"
