"""Measures what compressed gradients cost in accuracy: handwritten digits, trained with each communication hook and without.

    python -m benchmarks.ddp_hooks [--seeds 5] [--epochs 20] [--ranks 2] [--json FILE]

The job is examples/digits_stream.py, with its ranks in one process. Seeds are fixed, so every run on a machine has the same
weights, batches and bits. Bytes are those that the busiest rank sends; accuracy is on the 359 test images. Both are means over
the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import ferrorpc
from benchmarks.options import count
from ferrorpc.cli.table import table

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
# The examples are scripts, not a package.
# isort: split
import digits_stream

POINTS_MUST: Final = 0.5
BYTES_MUST: Final = {"int8": 0.27, "powersgd": 0.1}
SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the seeds.

    Attributes:
        accuracy: in percent.
        sent_bytes: of one training.
    """

    hook: str
    accuracy: float
    sent_bytes: float


def measure(hook: str, seeds: int, epochs: int, ranks: int) -> Outcome:
    """Trains once with every seed."""
    options = SimpleNamespace(epochs=epochs, rate=0.05, hook=hook)
    runs = [_run(ranks, SimpleNamespace(**vars(options), seed=seed)) for seed in range(seeds)]
    return Outcome(hook, 100 * statistics.mean(run[0] for run in runs), statistics.mean(run[1] for run in runs))


def _run(ranks: int, options: Any) -> tuple[float, int]:
    groups = [ferrorpc.ProcessGroup(backend, SECONDS) for backend in ferrorpc.SimulatedBackend.create_group(ranks)]

    def body(group: ferrorpc.ProcessGroup) -> tuple[float, int]:
        data = digits_stream.load(group, options.seed)
        weights, sync = digits_stream.set_up(group, options)
        digits_stream.train(weights, sync, data, group, options)
        return digits_stream.accuracy(weights, data.test_images, data.test_labels), sync.sent_bytes

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(body, groups))
    for group in groups:
        group.close()
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy and bytes of hooks on handwritten digits.")
    parser.add_argument("--seeds", type=count, default=5)
    parser.add_argument("--epochs", type=count, default=20)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    outcomes = [measure(hook, arguments.seeds, arguments.epochs, arguments.ranks) for hook in digits_stream.HOOKS]
    plain = outcomes[0]
    rows = []
    for outcome in outcomes:
        points, share = plain.accuracy - outcome.accuracy, outcome.sent_bytes / plain.sent_bytes
        must = BYTES_MUST.get(outcome.hook, 1.0)
        kept = points <= POINTS_MUST and share <= must
        rows.append(
            [outcome.hook, f"{outcome.accuracy:.2f}", f"{points:.2f}", f"{share:.4f}", f"{must:g}", "yes" if kept else "no"]
        )
    header = ["hook", "accuracy %", "points lost", "bytes", "must", "kept"]
    print(
        f"{arguments.seeds} seeds, {arguments.epochs} epochs, {arguments.ranks} ranks; at most {POINTS_MUST} points may be lost"
    )
    print(table(header, rows, right=frozenset(header[1:5])))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
