"""Measures all_reduce over gRPC on a link of 1 Gbit/s, beside the link's lower bound, Gloo and plain sockets.

    python -m benchmarks.link [--size 16MiB] [--rate 1000] [--json FILE]        (as root, with iproute2)

Two network namespaces joined by a veth pair stand for two hosts; a token bucket (tbf) shapes each direction. Without root
or the tools it says so and exits. The namespaces are removed however it ends; those of a run that was killed, by the next run.

The lower bound ("floor"). Each of two ranks needs all N bytes of the other's values in some form: exchanged whole (one-shot),
or half reduced here and its sum sent back (two-shot: N/2 + N/2). Either way N bytes go in each direction, both at once. The
bucket counts whole Ethernet frames: 1448 bytes of payload in 1514. So the floor is N / 1448 * 1514 * 8 / rate, minus the burst
that the bucket lets through at once. Acknowledgements need bandwidth too, so even plain sockets stay slightly above it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.options import amount, array_bytes, count
from ferrorpc.cli.bench import machine, report
from ferrorpc.cli.bench.case import ALL_REDUCE, GLOO, Case, Contender, System, ferrorpc_system
from ferrorpc.cli.bench.comparison import Comparison
from ferrorpc.cli.bench.rank_processes import Host
from ferrorpc.cli.table import table

PREFIX = "ferrorpc-bench-"
INTERFACE = "bench0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
BURST_BYTES = 128 << 10
QUEUE = "50ms"
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
MUST_SHARE, AIM_SHARE = 0.9, 0.97
MUST_INT8, AIM_INT8 = 2.5, 3.7
GRPC = ferrorpc_system("grpc")
SOCKETS = System("sockets", "benchmarks.sockets:SocketRunner")
CONTENDERS = (Contender(GRPC), Contender(GRPC, wire="bf16"), Contender(GRPC, wire="int8"), Contender(GLOO), Contender(SOCKETS))


def main() -> None:
    parser = argparse.ArgumentParser(description="all_reduce on two ranks over a shaped link.")
    parser.add_argument("--size", type=array_bytes, default="16MiB", help="bytes of float32 on each rank")
    parser.add_argument("--rate", type=count, default=1000, metavar="MBIT", help="megabits per second, each way")
    parser.add_argument("--seconds", type=amount, default=1.5, help="about how long one turn takes")
    parser.add_argument("--rounds", type=count, default=3, help="turns of each system")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    if not ready():
        return
    results = measure(arguments.size, arguments.rate, arguments.seconds, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(describe(results))


def ready() -> bool:
    """Whether namespaces can be made here; prints the reason if not. From now on a signal exits, so that they are removed."""
    reason = why_not()
    if reason:
        print(f"not measured: {reason}")
        return False
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("ended by a signal; the namespaces are removed"))
    return True


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"there is no {' and no '.join(missing)}: install iproute2" if missing else ""


def measure(size: int, rate_mbit: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Runs all systems over one link.

    Returns:
        {"machine", "loads", "systems", "rate_mbit", "floor_seconds", "rows" (of `Comparison.run`), "targets"}.
    """
    floor = floor_seconds(size, rate_mbit)
    facts = machine.describe()
    with link(rate_mbit) as hosts:
        comparison = Comparison(seconds=seconds, rounds=rounds, hosts=hosts, note=lambda text: print(text, file=sys.stderr))
        rows = comparison.run([Case(ALL_REDUCE, 2, size)], CONTENDERS)
    results = rows[0]["results"]
    for result in results.values():
        if "median_seconds" in result:
            result["share_of_floor"] = floor / result["median_seconds"]
    return {
        "machine": facts, "loads": comparison.loads, "systems": comparison.versions, "rate_mbit": rate_mbit,
        "floor_seconds": floor, "rows": rows,
        "targets": [
            _verdict("share of the floor", results["grpc"].get("share_of_floor"), MUST_SHARE, AIM_SHARE),
            _verdict("int8 against Gloo's float32", report.ratio(rows[0], "grpc int8", GLOO.name), MUST_INT8, AIM_INT8),
        ],
    }  # fmt: skip


def floor_seconds(size: int, rate_mbit: int) -> float:
    """The least time in which two ranks can add up `size` bytes each, uncompressed."""
    return (size / PAYLOAD_BYTES * FRAME_BYTES - BURST_BYTES) * 8 / (rate_mbit * 1e6)


def describe(results: dict[str, Any]) -> str:
    """The figures, their share of the floor, and the targets."""
    share = [
        f"{label}: {result['share_of_floor']:.3f} of the floor"
        for label, result in results["rows"][0]["results"].items()
        if "share_of_floor" in result
    ]
    header = ("what", "ratio", "must", "aim", "verdict")
    lines = [
        (
            each["what"],
            f"{each['ratio']:.3f}" if each["ratio"] else "-",
            f"{each['must']:g}",
            f"{each['aim']:g}",
            each["verdict"],
        )
        for each in results["targets"]
    ]
    floor = f"floor at {results['rate_mbit']} Mbit/s each way: {report.time_text(results['floor_seconds'])}"
    facts = machine.line(results["machine"], results["loads"])
    return "\n".join(
        [
            report.describe(results["rows"], [GLOO.name]),
            "",
            floor,
            *share,
            "",
            table(header, lines, right=frozenset(header[1:4])),
            facts,
        ]
    )


@contextmanager
def link(rate_mbit: int) -> Iterator[list[Host]]:
    """Makes two namespaces with a shaped link between them; yields the hosts that they stand for."""
    _remove_stale()
    names = [f"{PREFIX}{os.getpid()}-{side}" for side in ("a", "b")]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("rate", f"{rate_mbit}mbit", "burst", str(BURST_BYTES), "latency", QUEUE)
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield [Host(("ip", "netns", "exec", name), address, INTERFACE) for name, address in zip(names, ADDRESSES, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _remove_stale() -> None:
    """Removes namespaces of runs whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)):
        process = name.removeprefix(PREFIX).partition("-")[0]
        with suppress(ProcessLookupError):
            os.kill(int(process), 0)
            continue
        subprocess.run(["ip", "netns", "delete", name], check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _verdict(what: str, ratio: float | None, must: float, aim: float) -> dict[str, Any]:
    return {"what": what, "ratio": ratio, "must": must, "aim": aim, "verdict": targets.verdict(ratio, must, aim)}


if __name__ == "__main__":
    main()
