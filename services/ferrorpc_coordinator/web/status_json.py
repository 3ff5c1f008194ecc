"""A job's status as JSON for the page: one list per column of the members, which is smaller than one object per member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ferrorpc.v1 import identity_pb2, session_pb2
from ferrorpc.wire.member_states import state_name

_COLUMNS: Final = (
    "name",
    "rank",
    "host",
    "address",
    "step",
    "beat_age_ms",
    "behind_ms",
    "operation_ms",
    "activity",
    "reason",
)
"""Columns of the members that are named like the fields in identity.proto."""
_LABELS: Final = ("pid", "device")
"""Member labels with a column of their own; "" if a member lacks the label."""


def status_json(status: session_pb2.StatusResponse, at_ms: int) -> dict[str, Any]:
    """Everything the page shows. `at_ms` is the time on an arbitrary clock, to compute differences between two states."""
    position = status.position
    return {
        "at_ms": at_ms,
        "job": status.job,
        "version": status.version,
        "durable": status.durable,
        "cluster_id": position.cluster_id,
        "epoch": position.epoch,
        "generation": position.generation,
        "headline": {
            "level": status.headline.level,
            "title": status.headline.title,
            "details": list(status.headline.details),
        },
        "store": {"keys": status.store_keys, "bytes": status.store_bytes},
        "members": _members(status.members),
        "links": [
            [member.rank, link.peer_rank, link.kind, link.sent_bytes] for member in status.members for link in member.links
        ],
        "barriers": [_barrier(barrier) for barrier in status.barriers],
        "generations": [_generation(generation) for generation in status.generations],
        "occurrences": [_occurrence(occurrence) for occurrence in status.occurrences],
        "stragglers": [
            {"rank": straggler.rank, "barriers": straggler.barriers, "waited_ms": straggler.waited_ms}
            for straggler in status.stragglers
        ],
    }


def _members(members: Sequence[identity_pb2.Member]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [getattr(member, name) for member in members] for name in _COLUMNS}
    if any(member.training.steps for member in members):
        columns["training"] = [_training(member.training) for member in members]
    columns["state"] = [state_name(member.state) for member in members]
    for name in _LABELS:
        columns[name] = [next((label.value for label in member.labels if label.name == name), "") for member in members]
    return columns


def _training(training: identity_pb2.Training) -> list[int] | None:
    """Number of steps, and total milliseconds of computing, exposed and hidden communication; None before the first step."""
    if not training.steps:
        return None
    return [training.steps, training.compute_ms, training.exposed_ms, training.hidden_ms]


def _barrier(barrier: session_pb2.BarrierStatus) -> dict[str, Any]:
    return {
        "name": barrier.name,
        "generation": barrier.generation,
        "ordinal": barrier.ordinal,
        "age_ms": barrier.age_ms,
        "arrived": list(barrier.arrived_ranks),
        "arrived_after_ms": list(barrier.arrived_after_ms),
        "missing": list(barrier.missing_ranks),
    }


def _generation(generation: session_pb2.GenerationStatus) -> dict[str, Any]:
    return {
        "generation": generation.generation,
        "size": generation.size,
        "reason": generation.reason,
        "end_reason": generation.end_reason,
        "broken": generation.broken,
        "age_ms": generation.age_ms if generation.HasField("age_ms") else None,
        "lasted_ms": generation.lasted_ms if generation.HasField("lasted_ms") else None,
    }


def _occurrence(occurrence: session_pb2.Occurrence) -> dict[str, Any]:
    return {
        "number": occurrence.number,
        "kind": occurrence.kind,
        "text": occurrence.text,
        "rank": occurrence.rank,
        "age_ms": occurrence.age_ms,
    }
