"""The simulation finds each of six planted bugs, with the first seed that does written here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.checker import Violation
from tests.simulation.planted import BUGS
from tests.simulation.simulation import Simulation

SEEDS_MAX = 200
EXPECTED = {
    "no_fencing": "over, and was answered report",
    "no_dedupe": "added its",
    "wall_clock": "did nothing wrong",
    "cut_off": "did nothing wrong",
    "early_release": "without ranks",
    "lost_write": "acknowledged with",
}


def first_caught(bug: str) -> tuple[int, str]:
    """The first seed with a violation of the kind that this bug must cause, and the violation."""
    with BUGS[bug]():
        for seed in range(SEEDS_MAX):
            try:
                Simulation(seed).run()
            except Violation as violation:
                if EXPECTED[bug] in str(violation):
                    return seed, str(violation)
    raise AssertionError(f"{SEEDS_MAX} seeds did not catch {bug}")


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_a_planted_bug_is_caught(bug: str, record_property: Callable[[str, object], None]) -> None:
    seed, violation = first_caught(bug)
    record_property("seed", seed)
    record_property("violation", violation)
    Simulation(seed).run()
