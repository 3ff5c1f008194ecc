"""Compares predicted with measured times of all_reduce over gRPC: three algorithms, three sizes, real processes.

    python -m benchmarks.predictions [--ranks 4] [--fitted-at 2] [--sizes 16KiB 1MiB 8MiB] [--seconds 0.8] [--passes 4] [--json]

A cost table is fitted as by `ferrorpc bench --fit`, to all_gather, reduce_scatter and send; it knows no all_reduce. The
simulator then predicts all_reduce twice: with the table's row for the same number of ranks, and with only that for another
number. The ratio is predicted / measured. Fitted and predicted cases take turns in the same processes, and so do the two
numbers of ranks, because the speed of a machine may change by half within a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from benchmarks.options import amount, array_bytes, count
from ferrorpc.cli.bench.fit import Case, cases, measure, table_of
from ferrorpc.cli.table import table
from ferrorpc.collectives.predict import predict

ALGORITHMS = ("one_shot", "two_shot", "ring")
HEADER = ("algorithm", "bytes", "measured ms", "predicted ms", "ratio", "from other ranks ms", "ratio ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--fitted-at", type=count, default=2, help="another number of ranks to fit at")
    parser.add_argument("--sizes", type=array_bytes, nargs="+", default=[16 << 10, 1 << 20, 8 << 20])
    parser.add_argument("--seconds", type=amount, default=0.8, help="of each case")
    parser.add_argument("--passes", type=count, default=4, help="how many times new processes are started")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if min(options.ranks, options.fitted_at) < 2 or options.ranks == options.fitted_at:
        parser.error("--ranks and --fitted-at are two different numbers of at least 2")
    fitted_to = cases()
    predicted = [Case("all_reduce", name, size) for name in ALGORITHMS for size in options.sizes]
    worlds = {options.fitted_at: fitted_to} | {options.ranks: [*fitted_to, *predicted]}
    times = measure(worlds, options.seconds, options.passes)
    costs = table_of({ranks: found[: len(fitted_to)] for ranks, found in times.items()})
    alone = {ranks: replace(costs, rows={ranks: row}) for ranks, row in costs.rows.items()}
    rows = []
    for case, measured in zip(predicted, times[options.ranks][len(fitted_to) :], strict=True):
        same, other = (
            predict(case.entry, case.call(options.ranks), options.ranks, alone[ranks].costs(options.ranks)).seconds
            for ranks in (options.ranks, options.fitted_at)
        )
        rows.append((case.algorithm, case.nbytes, measured, same, other))
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    sys.stdout.write("".join(f"fitted at {ranks} ranks: {found}\n" for ranks, found in costs.rows.items()))
    shown = [
        (name, str(nbytes), f"{t * 1e3:.3f}", f"{same * 1e3:.3f}", f"{same / t:.2f}", f"{other * 1e3:.3f}", f"{other / t:.2f}")
        for name, nbytes, t, same, other in rows
    ]
    sys.stdout.write(table(HEADER, shown, right=frozenset(HEADER[1:])) + "\n")


if __name__ == "__main__":
    main()
