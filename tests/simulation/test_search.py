"""Searched schedules at random costs, beside the best named one under the same cap. FERRORPC_SEEDS sets how many, up to 500."""

from __future__ import annotations

import os
import random

import pytest

from ferrorpc import schedules
from tests.unit.pipeline.test_search import best_named, random_costs

COUNT = min(500, int(os.environ.get("FERRORPC_SEEDS", "6")))
STAGES, MICROBATCHES = 4, 8
CAPS = (float(STAGES), 2.0 * STAGES, None)


@pytest.mark.timeout(1800)
def test_it_is_never_worse_and_better_for_most() -> None:
    draw = random.Random(0)
    better = 0
    for number in range(COUNT):
        costs, latency, cap = random_costs(draw, STAGES), draw.uniform(0, 0.5), CAPS[number % len(CAPS)]
        found = schedules.search(costs, latency, cap, microbatches=MICROBATCHES)
        assert found.validate(peak=cap) == []
        makespan = found.simulate(**costs, latency=latency).makespan
        named = best_named(costs, latency, cap, MICROBATCHES)
        assert makespan <= named + 1e-9, f"vector {number}"
        better += makespan < named - 1e-9
    print(f"{better} of {COUNT} better")
    assert better >= 0.6 * COUNT
