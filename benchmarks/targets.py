"""Performance targets: how many times as fast as a peer ferrorpc should be, by the ratio of medians within one run.

A release must reach `must`, and should reach `aim`. Targets name roles instead of transports: FAST is the fastest transport
within a host (the first one of a comparison), GRPC is the transport between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ferrorpc.cli.bench import report
from ferrorpc.cli.bench.case import ALL_REDUCE, BARRIER, SEND, Case
from ferrorpc.cli.table import table

FAST = "fast"
FAST_REGISTERED = "fast registered"
TENSORS = " torch"
"""The suffix of a transport's name when it is called with torch tensors."""
GRPC = "grpc"
FLIGHT = "flight"
PROTOBUF_STREAM = "protobuf stream"
KIB, MIB = 1 << 10, 1 << 20
SMALL = (64, KIB, 4 * KIB, 16 * KIB)
MEDIUM = (64 * KIB, 256 * KIB)
LARGE = (MIB, 4 * MIB)
HUGE = (16 * MIB, 64 * MIB)
SIZES = (*SMALL, *MEDIUM, *LARGE, *HUGE)


@dataclass(frozen=True, slots=True)
class Target:
    """Cases for which a role is compared with a peer."""

    cases: tuple[Case, ...]
    role: str
    peer: str
    must: float
    aim: float


def _sums(sizes: Sequence[int], ranks: int = 2, dtype: str = "float32") -> tuple[Case, ...]:
    return tuple(Case(ALL_REDUCE, ranks, size, dtype) for size in sizes)


HALVES = (*_sums((16 * MIB,), dtype="float16"), *_sums((16 * MIB,), dtype="bfloat16"))
TARGETS = (
    Target((Case(BARRIER),), FAST, "gloo", 50, 100),
    Target(_sums(SMALL), FAST, "gloo", 10, 30),
    Target(_sums(MEDIUM), FAST, "gloo", 4, 10),
    Target(_sums(MEDIUM), FAST_REGISTERED, "gloo", 7, 16),
    Target(_sums(LARGE), FAST, "gloo", 2, 3),
    Target(_sums(LARGE), FAST_REGISTERED, "gloo", 3.5, 5),
    Target(_sums(HUGE), FAST, "gloo", 1.3, 3),
    Target(_sums(HUGE), FAST_REGISTERED, "gloo", 2.5, 4),
    Target(_sums(SMALL[:3]), FAST, "mpich", 0.7, 1),
    Target(_sums(SIZES[3:]), FAST_REGISTERED, "mpich", 1.3, 3),
    Target(_sums(SIZES[1:], ranks=4), FAST, "gloo", 1.3, 3),
    Target(HALVES, FAST, "gloo", 2, 5),
    Target(HALVES, FAST + TENSORS, "gloo", 2, 5),
    Target((Case(SEND, 2, MIB),), GRPC, FLIGHT, 0.9, 1.05),
    Target((Case(SEND, 2, MIB),), GRPC, PROTOBUF_STREAM, 1.5, 2),
    Target((Case(SEND, 2, 16 * MIB),), GRPC, PROTOBUF_STREAM, 4, 6),
    Target((Case(SEND, 2, 64 * MIB),), GRPC, PROTOBUF_STREAM, 8, 12),
    Target(_sums((16 * MIB,)), GRPC, "gloo", 0.28, 0.5),
)


def judge(rows: Sequence[dict[str, Any]], fast: str) -> list[dict[str, Any]]:
    """Every target for every case that was measured.

    Args:
        rows: of `Comparison.run`.
        fast: the transport that FAST stands for.

    Returns:
        {"case", "system", "peer", "ratio" (of medians), "ratio_of_minima", "must", "aim", "verdict"} each; without ratios,
        and with "not measured" as verdict, where one of the two has no figures.
    """
    measured = {Case(**row["case"]): row for row in rows}
    return [_verdict(target, case, measured[case], fast) for target, case in _pairs() if case in measured]


def verdict(ratio: float | None, must: float, aim: float) -> str:
    """Whether a ratio reaches its target."""
    return "not measured" if ratio is None else "aim" if ratio >= aim else "must" if ratio >= must else "MISSED"


def describe(verdicts: Sequence[dict[str, Any]]) -> str:
    """The verdicts as a table, missed targets included."""
    header = ("case", "ferrorpc", "against", "medians", "minima", "must", "aim", "verdict")
    lines = [
        (
            Case(**each["case"]).title, each["system"], each["peer"], report.ratio_text(each.get("ratio")),
            report.ratio_text(each.get("ratio_of_minima")), f"{each['must']:g}", f"{each['aim']:g}", each["verdict"],
        )
        for each in verdicts
    ]  # fmt: skip
    return table(header, lines, right=frozenset(header[3:7]))


def _pairs() -> Iterator[tuple[Target, Case]]:
    return ((target, case) for target in TARGETS for case in target.cases)


def _verdict(target: Target, case: Case, row: dict[str, Any], fast: str) -> dict[str, Any]:
    label = target.role.replace(FAST, fast)
    found = {"case": case.to_json(), "system": label, "peer": target.peer, "must": target.must, "aim": target.aim}
    ratio = report.ratio(row, label, target.peer)
    found["verdict"] = verdict(ratio, target.must, target.aim)
    if ratio is None:
        return found
    return {**found, "ratio": ratio, "ratio_of_minima": report.ratio(row, label, target.peer, "min_seconds")}
