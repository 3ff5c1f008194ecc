"""`ferrorpc bench rendezvous`: the time of a rendezvous, from the moment all members join until the last has its rank.

Connecting is timed separately. Each measurement is made without and with a data directory, which shows the cost of the journal.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final

import click

from ferrorpc.cli.bench import load_generator, torch_baseline

MEMBERS: Final = 128
REPETITIONS: Final = 5


def run(members: int = MEMBERS, repetitions: int = REPETITIONS, *, peers: bool = True) -> dict[str, Any]:
    """Measures the rendezvous of `members` sessions; with `peers` also torch's c10d rendezvous, if torch is installed."""
    results: dict[str, Any] = {"benchmark": "rendezvous", "members": members, "repetitions": repetitions}
    for label, durable in (("in_memory", False), ("journal", True)):
        with load_generator.coordinator_process(durable=durable) as address:
            results[label] = asyncio.run(_measure(address, members, repetitions))
    if peers:
        results["c10d"] = torch_baseline.measure("rendezvous", members)
    return results


async def _measure(address: str, members: int, repetitions: int) -> dict[str, Any]:
    connecting, joining = [], []
    for repetition in range(repetitions + 1):
        async with load_generator.sessions(address, f"rendezvous-{repetition}", members) as (sessions, connect_seconds):
            seconds = await _join_all(sessions)
            await asyncio.gather(*(session.leave() for session in sessions))
        if repetition > 0:  # the first is a warm-up
            connecting.append(connect_seconds)
            joining.append(seconds)
    return {"connect": load_generator.summary(connecting), "rendezvous": load_generator.summary(joining)}


async def _join_all(sessions: list[load_generator.LoadSession]) -> float:
    began = time.perf_counter()
    results = await load_generator.join(sessions)
    seconds = time.perf_counter() - began
    ranks = sorted(result.rank for result in results)
    if ranks != list(range(len(sessions))):
        raise AssertionError(f"the ranks given out are {ranks}")
    return seconds


@click.command("rendezvous")
@click.option("--members", type=click.IntRange(min=1), default=MEMBERS, show_default=True, help="Number of members that join.")
@click.option(
    "--repetitions", type=click.IntRange(min=1), default=REPETITIONS, show_default=True, help="Number of measured rounds."
)
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also measure torch's c10d, if installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(members: int, repetitions: int, peers: bool, as_json: bool) -> None:
    """Measure how long a rendezvous of many members takes."""
    results = run(members, repetitions, peers=peers)
    click.echo(json.dumps(results) if as_json else describe(results))


def describe(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"{results['members']} members, median of {results['repetitions']} rounds (first to last answer):"]
    for label in ("in_memory", "journal"):
        measured = results[label]
        lines.append(
            f"  ferrorpc, {label.replace('_', ' '):<10} {measured['rendezvous']['median_ms']:9.1f} ms"
            f"   connecting apart: {measured['connect']['median_ms']:.1f} ms"
        )
    if "c10d" in results:
        lines.append(f"  torch c10d rendezvous {torch_baseline.describe(results['c10d'])}")
    return "\n".join(lines)
