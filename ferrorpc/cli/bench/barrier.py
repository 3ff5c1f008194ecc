"""`ferrorpc bench barrier`: the time of a named barrier, from the moment all sessions arrive until the last is released.

Measures the barrier of a generation (64 ranks) and a barrier of sessions that have joined none (1,000). Connecting is timed
separately. Each measurement is made without and with a data directory, which shows the cost of the journal.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final

import click

from ferrorpc.cli.bench import load_generator, torch_baseline
from ferrorpc.v1 import barrier_pb2

RANKS: Final = 64
SESSIONS: Final = 1_000
REPETITIONS: Final = 15


def run(ranks: int = RANKS, sessions: int = SESSIONS, repetitions: int = REPETITIONS, *, peers: bool = True) -> dict[str, Any]:
    """Measures a barrier of `ranks` in a generation and one of `sessions` in none; with `peers` also torch's TCPStore."""
    results: dict[str, Any] = {"benchmark": "barrier", "ranks": ranks, "sessions": sessions, "repetitions": repetitions}
    for label, durable in (("in_memory", False), ("journal", True)):
        with load_generator.coordinator_process(durable=durable) as address:
            world = asyncio.run(_measure(address, "world", ranks, repetitions, joined=True))
            crowd = asyncio.run(_measure(address, "crowd", sessions, repetitions, joined=False))
        results[label] = {"world": world, "crowd": crowd}
    if peers:
        results["tcp_store"] = {
            "world": torch_baseline.measure("barrier", ranks),
            "crowd": torch_baseline.measure("barrier", sessions),
        }
    return results


async def _measure(address: str, job: str, count: int, repetitions: int, *, joined: bool) -> dict[str, Any]:
    async with load_generator.sessions(address, job, count) as (members, connecting):
        generation = int((await load_generator.join(members))[0].generation) if joined else 0
        await _meet(members, generation, 1)  # a warm-up
        seconds = [await _meet(members, generation, ordinal) for ordinal in range(2, repetitions + 2)]
        await asyncio.gather(*(member.leave() for member in members))
    return {"connect_ms": round(connecting * 1e3, 3), "barrier": load_generator.summary(seconds)}


async def _meet(members: list[load_generator.LoadSession], generation: int, ordinal: int) -> float:
    count = 0 if generation else len(members)
    request = barrier_pb2.BarrierRequest(
        generation=generation, name="bench", ordinal=ordinal, count=count, timeout_ms=load_generator.TIMEOUT_MS
    )
    began = time.perf_counter()
    results = await asyncio.gather(*(member.request(barrier=request) for member in members))
    seconds = time.perf_counter() - began
    short = [len(result.barrier.payloads) for result in results if len(result.barrier.payloads) != len(members)]
    if short:
        raise AssertionError(f"{len(short)} results do not have {len(members)} payloads but {short[:3]}")
    return seconds


@click.command("barrier")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=RANKS,
    show_default=True,
    help="Members of the generation whose barrier is measured.",
)
@click.option(
    "--sessions",
    type=click.IntRange(min=1),
    default=SESSIONS,
    show_default=True,
    help="Sessions of the barrier without a generation.",
)
@click.option(
    "--repetitions", type=click.IntRange(min=1), default=REPETITIONS, show_default=True, help="Number of measured barriers."
)
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also measure torch's TCPStore, if installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(ranks: int, sessions: int, repetitions: int, peers: bool, as_json: bool) -> None:
    """Measure how long a named barrier of many sessions takes."""
    results = run(ranks, sessions, repetitions, peers=peers)
    click.echo(json.dumps(results) if as_json else describe(results))


def describe(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"named barriers, median of {results['repetitions']} (first arrival to last release):"]
    for kind, count in (("world", results["ranks"]), ("crowd", results["sessions"])):
        for label in ("in_memory", "journal"):
            measured = results[label][kind]
            lines.append(
                f"  {count:5} sessions, {label.replace('_', ' '):<10} {measured['barrier']['median_ms']:9.1f} ms"
                f"   connecting apart: {measured['connect_ms']:.1f} ms"
            )
        if "tcp_store" in results:
            lines.append(f"  {count:5} torch TCPStore clients {torch_baseline.describe(results['tcp_store'][kind])}")
    return "\n".join(lines)
