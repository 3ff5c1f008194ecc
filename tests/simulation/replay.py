"""Runs one seed and prints everything that happens in it: python -m tests.simulation.replay SEED [--bug NAME]."""

from __future__ import annotations

import argparse
import contextlib

from tests.simulation.checker import Violation
from tests.simulation.planted import BUGS
from tests.simulation.simulation import Simulation


def main() -> int:
    """Entry point; 1 when an invariant does not hold."""
    parser = argparse.ArgumentParser(description="replays one seed of the coordinator's simulation")
    parser.add_argument("seed", type=int)
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug first")
    arguments = parser.parse_args()
    with BUGS[arguments.bug]() if arguments.bug else contextlib.nullcontext():
        try:
            Simulation(arguments.seed, trace=print).run()
        except Violation as violation:
            print(f"VIOLATION {violation}")
            return 1
    print("all invariants hold")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
