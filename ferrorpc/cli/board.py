"""A job's status as a page of plain text: what the coordinator's status page shows, for a terminal.

Rates come from two answers; where there is only one, their columns are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ferrorpc.cli.table import table
from ferrorpc.logs import tame

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member
    from ferrorpc.v1.session_pb2 import BarrierStatus, GenerationStatus, StatusResponse

GENERATIONS_SHOWN: Final = 8
EVENTS_SHOWN: Final = 8
STRAGGLERS_SHOWN: Final = 4
LINKS_SHOWN: Final = 8
TRAINING_SHOWN: Final = 8
MATRIX_RANKS_MAX: Final = 12
LATE_MS: Final = 2000
"""A rank that is behind and whose step did not move for so long is late."""
IN_STEP: Final = 64
"""Ranks that are at most so many operations apart work in step."""
_ORDER: Final = ("dead", "suspect", "stalled", "joining", "waiting", "active", "left")
_GONE: Final = ("dead", "left")
"""Whoever is, and has no rank in the newest generation, is of an earlier one."""
_RIGHT: Final = frozenset({"rank", "step", "last beat", "late by", "ops/s", "in ops"})


@dataclass(frozen=True, slots=True)
class Earlier:
    """The answer before, and how long ago it came."""

    response: StatusResponse
    seconds: float


def as_text(response: StatusResponse, earlier: Earlier | None = None, rows_max: int | None = None) -> str:
    """The whole answer. With `rows_max`, whoever is in trouble comes first, and the rest of the members is counted."""
    position = response.position
    kept = "journal on disk" if response.durable else "in memory"
    parts = [
        f"job {response.job}  generation {position.generation}  cluster {position.cluster_id} epoch {position.epoch}  "
        f"({kept}, coordinator {response.version})",
        f"store: {response.store_keys} keys, {response.store_bytes} bytes",
    ]
    if response.waiting_reason:
        parts.append(tame(f"waiting: {response.waiting_reason}"))
    parts.append(_members(response.members, earlier, rows_max))
    if response.barriers:
        parts.append(_titled("open barriers", [_barrier(barrier) for barrier in response.barriers]))
    if response.stragglers:
        parts.append(_titled("came last to named barriers", _stragglers(response)))
    training = _training(response)
    if training:
        parts.append(_titled("training steps, means in milliseconds", training))
    links = _links(response, earlier)
    if links:
        parts.append(_titled("links", links))
    if response.generations:
        shown = list(response.generations)[-GENERATIONS_SHOWN:]
        parts.append(_titled("generations", [_generation(generation) for generation in shown]))
    if response.occurrences:
        last = list(response.occurrences)[-EVENTS_SHOWN:]
        parts.append(_titled("events", [f"{_ago(event.age_ms):>8} ago  {event.kind}: {event.text}" for event in last]))
    return "\n\n".join(parts)


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {tame(line)}" for line in lines)])


# -- members -----------------------------------------------------------------------------------------------------------


def state_of(member: Member) -> str:
    """The member's state as a word."""
    from ferrorpc.v1.identity_pb2 import MemberState

    return MemberState.Name(member.state).removeprefix("MEMBER_STATE_").lower()


def _members(members: Sequence[Member], earlier: Earlier | None, rows_max: int | None) -> str:
    there = [member for member in members if member.rank >= 0 or state_of(member) not in _GONE]
    gone = [member for member in members if member.rank < 0 and state_of(member) in _GONE]
    text = _rows(there, earlier, rows_max) if there else "no members"
    return f"{text}\nearlier processes: {_counted(gone)}" if gone else text


def _rows(members: list[Member], earlier: Earlier | None, rows_max: int | None) -> str:
    ordered = sorted(members, key=lambda m: (m.rank < 0, m.rank, m.name))
    late = _lateness(members)
    hidden = 0
    if rows_max is not None and len(ordered) > rows_max:
        ordered.sort(key=lambda m: (_ORDER.index(state_of(m)), -late[m.name]))
        hidden = len(ordered) - rows_max
    before = {member.name: member for member in earlier.response.members} if earlier else {}
    seconds = earlier.seconds if earlier else 0.0
    rows = [_row(member, before.get(member.name), seconds, late[member.name]) for member in ordered[:rows_max]]
    header = ("rank", "name", "state", "host", "step", "ops/s", "in ops", "late by", "last beat", "doing", "why")
    kept = [column for column, name in enumerate(header) if name in _ALWAYS or any(row[column] for row in rows)]
    text = table([header[column] for column in kept], [[row[column] for column in kept] for row in rows], right=_RIGHT)
    return f"{text}\n... and {hidden} more; of all: {_counted(members)}" if hidden else text


def _counted(members: Sequence[Member]) -> str:
    states = [state_of(member) for member in members]
    return ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)


_ALWAYS: Final = frozenset({"rank", "name", "state", "host", "step", "last beat", "doing", "why"})


def _lateness(members: Sequence[Member]) -> dict[str, int]:
    """Member -> milliseconds for which its step has not moved though another one's is ahead; 0 where it keeps up.

    Where all stand, the others wait for those behind if the ranks work in step. Ranks that do different things, such as stages
    of a pipeline, drift apart; they are late only while others move.
    """
    seated = [member for member in members if member.rank >= 0 and state_of(member) not in _GONE]
    steps = [member.step for member in seated] or [0]
    front = max(steps)
    moved = min((member.step_age_ms for member in seated), default=0)
    grace = LATE_MS + (0 if front - min(steps) <= IN_STEP else moved)
    late = {member.name for member in seated if member.step < front and member.step_age_ms > grace}
    return {member.name: member.step_age_ms if member.name in late else 0 for member in members}


def _row(member: Member, before: Member | None, seconds: float, late_ms: int) -> tuple[str, ...]:
    rate = within = ""
    if before is not None and seconds > 0 and member.step >= before.step and member.rank >= 0:
        rate = f"{(member.step - before.step) / seconds:.1f}"
        within = f"{min(100.0, (member.operation_ms - before.operation_ms) / seconds / 10):.0f} %"
    return (
        str(member.rank) if member.rank >= 0 else "-",
        member.name,
        state_of(member),
        member.host or "-",
        str(member.step),
        rate,
        within,
        f"{late_ms / 1000:.1f} s" if late_ms else "",
        "-" if state_of(member) in _GONE else f"{member.beat_age_ms / 1000:.1f} s",
        member.activity or "-",
        member.reason,
    )


# -- the rest ----------------------------------------------------------------------------------------------------------


def _barrier(barrier: BarrierStatus) -> str:
    missing = ", ".join(map(str, barrier.missing_ranks)) or "none"
    last = f", the last {max(barrier.arrived_after_ms) / 1000:.1f} s after the first" if barrier.arrived_after_ms else ""
    return (
        f"{barrier.name} #{barrier.ordinal} of generation {barrier.generation}: {len(barrier.arrived_ranks)} arrived{last}, "
        f"missing ranks {missing}, open for {barrier.age_ms / 1000:.1f} s"
    )


def _stragglers(response: StatusResponse) -> list[str]:
    return [
        f"rank {straggler.rank}: {straggler.barriers} of the last ones, waited for {straggler.waited_ms / 1000:.2f} s in all"
        for straggler in list(response.stragglers)[:STRAGGLERS_SHOWN]
    ]


def _training(response: StatusResponse) -> list[str]:
    """A table of who computes and who waits; whoever computes longest is who the others wait for."""
    members = sorted((m for m in response.members if m.rank >= 0 and m.training.steps), key=lambda m: m.rank)
    if not members:
        return []
    means = {
        m.rank: [value / m.training.steps for value in (m.training.compute_ms, m.training.exposed_ms, m.training.hidden_ms)]
        for m in members
    }
    ordered = sorted(members, key=lambda m: -means[m.rank][0])
    rows = [
        [str(m.rank), str(m.training.steps), *(f"{value:.1f}" for value in means[m.rank])] for m in ordered[:TRAINING_SHOWN]
    ]
    header = ["rank", "steps", "compute", "exposed", "hidden"]
    lines = table(header, rows, right=frozenset(header)).splitlines()
    if len(means) > 1:
        slowest, others = ordered[0].rank, [times[0] for rank, times in means.items() if rank != ordered[0].rank]
        behind = means[slowest][0] - sum(others) / len(others)
        lines.append(f"rank {slowest} computes longest, {behind:.1f} ms a step more than the others' mean")
    return lines


def _generation(generation: GenerationStatus) -> str:
    end = f"; ended: {generation.end_reason}" if generation.end_reason else ""
    times = f", {_ago(generation.age_ms)} ago" if generation.HasField("age_ms") else ""
    times += f", lasted {_ago(generation.lasted_ms)}" if generation.HasField("lasted_ms") else ""
    return f"{generation.generation}: {generation.size} members{times}, {generation.reason}{end}"


def _links(response: StatusResponse, earlier: Earlier | None) -> list[str]:
    """Bytes a second from row to column where two answers tell it and the world is small; else the busiest links."""
    sent = _sent(response)
    if not sent:
        return []
    size = max(max(pair) for pair in sent) + 1
    if earlier is None:
        return _busiest({pair: (kind, float(count), "") for pair, (kind, count) in sent.items()})
    before = _sent(earlier.response)
    rates = {
        pair: (kind, max(0, count - before.get(pair, ("", 0))[1]) / earlier.seconds, "/s")
        for pair, (kind, count) in sent.items()
    }
    if size > MATRIX_RANKS_MAX:
        return _busiest(rates)
    header = ["to", *map(str, range(size))]
    rows = [
        [f"from {row}", *(_bytes(rates[row, column][1]) if (row, column) in rates else "" for column in range(size))]
        for row in range(size)
    ]
    kinds = ", ".join(sorted({kind for kind, _, _ in rates.values()}))
    return [f"bytes a second by {kinds}", *table(header, rows, right=frozenset(header[1:])).splitlines()]


def _sent(response: StatusResponse) -> dict[tuple[int, int], tuple[str, int]]:
    return {
        (member.rank, link.peer_rank): (link.kind, link.sent_bytes)
        for member in response.members
        if member.rank >= 0
        for link in member.links
    }


def _busiest(links: dict[tuple[int, int], tuple[str, float, str]]) -> list[str]:
    order = sorted(links.items(), key=lambda item: (-item[1][1], item[0]))[:LINKS_SHOWN]
    return [f"rank {source} to {target} by {kind}: {_bytes(count)}{unit}" for (source, target), (kind, count, unit) in order]


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _ago(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
