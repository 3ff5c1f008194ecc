"""Compares ferrorpc with Gloo, MPICH, pyarrow Flight and a protobuf stream over grpcio, in one run and in turns.

    python -m benchmarks.compare [--sections barrier all_reduce four_ranks half exchange send] [--transports shared_memory,grpc]
                                 [--json FILE] [--plot FILE.png] [--from FILE ...]

Systems that are not installed or cannot start are listed with the reason. docs/benchmarks.md says how it is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot, targets
from benchmarks.options import amount, count
from ferrorpc.cli.bench import machine, report
from ferrorpc.cli.bench.all_reduce import contenders
from ferrorpc.cli.bench.case import (
    ALL_REDUCE,
    BARRIER,
    EXCHANGES,
    GLOO,
    ORDINARY,
    ROUND_TRIP,
    SEND,
    Case,
    Contender,
    System,
    ferrorpc_system,
)
from ferrorpc.cli.bench.comparison import Comparison

FLIGHT = System(targets.FLIGHT, "benchmarks.flight:FlightRunner", needs=("pyarrow",))
PROTOBUF_STREAM = System(targets.PROTOBUF_STREAM, "benchmarks.protobuf_stream:ProtobufStreamRunner")
MIB = 1 << 20
SECTIONS = {
    "barrier": [Case(BARRIER), Case(BARRIER, 4)],
    "all_reduce": [Case(ALL_REDUCE, 2, size) for size in targets.SIZES],
    "four_ranks": [Case(ALL_REDUCE, 4, size) for size in targets.SIZES[1:]],
    "half": [Case(ALL_REDUCE, 2, 16 * MIB, dtype) for dtype in ("float16", "bfloat16")],
    "exchange": [Case(operation, 2, size) for operation in EXCHANGES for size in (1 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB)],
    "send": [Case(ROUND_TRIP, 2, 64), *(Case(SEND, 2, size * MIB) for size in (1, 16, 64))],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares ferrorpc with Gloo, MPICH, Flight and a protobuf stream.")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--transports", default="shared_memory,grpc", help="of ferrorpc; targets apply to the first")
    parser.add_argument("--seconds", type=amount, default=0.2, help="about how long one turn takes")
    parser.add_argument("--rounds", type=count, default=3, help="turns of each system for each case, with one set of processes")
    parser.add_argument("--restarts", type=count, default=2, help="sets of fresh processes")
    parser.add_argument("--patience", type=int, default=3, help="how often a turn disturbed by other processes is repeated")
    parser.add_argument("--pin", action="store_true", help="bind rank r of every system to processor r")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot all_reduce there")
    parser.add_argument(
        "--from", dest="files", type=Path, nargs="+", metavar="FILE", help="show earlier figures; measure nothing"
    )
    arguments = parser.parse_args()
    results = merge(arguments.files) if arguments.files else measure(arguments)
    _save(results, arguments.json)
    if arguments.plot:
        plot.draw(results, arguments.plot)
    print(describe(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the sections, and saves the results after each of them.

    Returns:
        {"machine", "loads", "transports", "systems": {name: version}, "rows" (of `Comparison.run`), "targets" (of `judge`)}.
    """
    transports = arguments.transports.split(",")
    comparison = Comparison(
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        restarts=arguments.restarts,
        patience=arguments.patience,
        pin=arguments.pin,
        note=_note,
    )
    facts = machine.describe()
    results: dict[str, Any] = {"machine": facts, "transports": transports, "pinned": arguments.pin, "rows": []}
    for section in arguments.sections:
        results["rows"] += comparison.run(SECTIONS[section], _contenders(section, transports))
        results |= {"loads": comparison.loads, "systems": comparison.versions}
        results["targets"] = targets.judge(results["rows"], transports[0])
        _save(results, arguments.json)
    return results


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """Merges the results of several runs. Each row, and so each ratio, is of one run; the last row of a case counts."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    rows = {Case(**row["case"]): row for run in runs for row in run["rows"]}
    merged: dict[str, Any] = {**runs[-1], "rows": list(rows.values())}
    merged["loads"] = [load for run in runs for load in run["loads"]]
    merged["systems"] = {name: version for run in runs for name, version in run["systems"].items()}
    merged["targets"] = targets.judge(merged["rows"], merged["transports"][0])
    return merged


def describe(results: dict[str, Any]) -> str:
    """All figures, then the targets, then the machine and the versions."""
    peers = [GLOO.name, "mpich", FLIGHT.name, PROTOBUF_STREAM.name]
    systems = "; ".join(f"{name}: {version}" for name, version in results["systems"].items())
    facts = machine.line(results["machine"], results["loads"])
    parts = [report.describe(results["rows"], peers), targets.describe(results["targets"]), f"{facts}\n{systems}"]
    return "\n\n".join(parts)


def tensor_system(transport: str) -> System:
    """ferrorpc with this transport and torch tensors."""
    return System(
        f"{transport}{targets.TENSORS}",
        "benchmarks.torch_tensors:FerrorpcTensorRunner",
        {"transport": transport},
        needs=("torch",),
    )


def _contenders(section: str, transports: Sequence[str]) -> list[Contender]:
    if section == "barrier":
        return [each for each in contenders(transports, peers=True) if each.memory == ORDINARY]
    if section == "half":
        return [*(Contender(tensor_system(transport)) for transport in transports), *contenders(transports, peers=True)]
    if section != "send":
        return contenders(transports, peers=True)
    peers = [Contender(system) for system in (FLIGHT, PROTOBUF_STREAM, GLOO)]
    return [*(Contender(ferrorpc_system(transport)) for transport in transports), *peers]


def _save(results: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
