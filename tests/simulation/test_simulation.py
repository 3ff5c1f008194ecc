"""A thousand seeds, each with other faults; no invariant may be violated in any of them.

FERRORPC_SEEDS=N runs N of them. A failing seed is replayed with `python -m tests.simulation.replay SEED`.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.checker import Violation
from tests.simulation.simulation import Simulation

SEEDS = int(os.environ.get("FERRORPC_SEEDS", "1000"))
CHUNK = 50


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_invariant_holds_and_work_goes_on_after_healing(first: int) -> None:
    for seed in range(first, min(first + CHUNK, SEEDS)):
        try:
            Simulation(seed).run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}\nreplay: python -m tests.simulation.replay {seed}")


def test_a_seed_replays_exactly() -> None:
    first: list[str] = []
    second: list[str] = []
    Simulation(7, trace=first.append).run()
    Simulation(7, trace=second.append).run()
    assert len(first) > 100
    assert first == second


def test_the_faults_really_happen() -> None:
    lines: list[str] = []
    for seed in range(20):
        Simulation(seed, trace=lines.append).run()
    text = "\n".join(lines)
    happenings = (
        "crashes, ",
        "coordinator pauses",
        "coordinator starts on",
        "is stopped",
        "holds its interpreter lock",
        "leaves on stream",
        "breaks",
        "cut off silently",
        "the coordinator is cut off",
        "lost its link",
        "which has ended",
        "resumes",
        "is fenced",
        "everything heals",
    )
    assert [what for what in happenings if what not in text] == []
