"""A job's status as plain text: the content of the coordinator's status page, for a terminal.

Rates are computed from two responses; with only one, their columns are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ferrorpc.cli.table import table
from ferrorpc.logs import escape_unprintable
from ferrorpc.wire.member_states import state_name

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member
    from ferrorpc.v1.session_pb2 import BarrierStatus, GenerationStatus, StatusResponse

GENERATIONS_SHOWN: Final = 8
EVENTS_SHOWN: Final = 8
STRAGGLERS_SHOWN: Final = 4
LINKS_SHOWN: Final = 8
TRAINING_SHOWN: Final = 8
MATRIX_RANKS_MAX: Final = 12
RATES_SECONDS_MIN: Final = 0.2
"""Over less time no rates are taken."""
SLOW_FACTOR: Final = 1.3
SLOW_MS_MIN: Final = 1.0
"""A rank is slow that needs so many times, and so much more than, the time of the rank in the middle."""
_STATE_ORDER: Final = ("dead", "suspect", "stalled", "joining", "waiting", "active", "unknown", "left")
GONE: Final = ("dead", "left")
"""States of members that have ended. Without a rank in the newest generation they belong to an earlier one."""
_RIGHT_ALIGNED: Final = frozenset({"rank", "step", "last beat", "behind for", "ops/s", "in ops"})


@dataclass(frozen=True, slots=True)
class PreviousStatus:
    """An earlier response, and the seconds since then."""

    response: StatusResponse
    seconds: float

    def members(self) -> dict[str, Member]:
        """Its members by name."""
        return {member.name: member for member in self.response.members}


def as_text(response: StatusResponse, previous: PreviousStatus | None = None, rows_max: int | None = None) -> str:
    """The whole response. With `rows_max`, at most so many members are listed, those in trouble first; the rest is counted."""
    position = response.position
    told = response.headline
    details = [*told.details, _slowest(response.members, previous) if told.level == "good" else ""]
    kept = "journal on disk" if response.durable else "in memory"
    head = (
        f"job {response.job}  generation {position.generation}  cluster {position.cluster_id} epoch {position.epoch}  "
        f"({kept}, coordinator {response.version})"
    )
    generations = [_generation(generation) for generation in reversed(response.generations)]
    events = [f"{_ago(event.age_ms):>8} ago  {event.kind}: {event.text}" for event in reversed(response.occurrences)]
    sections = {
        "open barriers": [_barrier(barrier) for barrier in response.barriers],
        "came last to the script's named barriers": _stragglers(response),
        "training steps, means in milliseconds": _training(response),
        "links": _links(response, previous),
        "generations, the newest first": _first(generations, GENERATIONS_SHOWN),
        "events, the newest first": _first(events, EVENTS_SHOWN),
    }
    parts = [
        escape_unprintable(head),
        "\n".join(escape_unprintable(line) for line in (told.title, "; ".join(filter(None, details))) if line),
        f"store: {_plural(response.store_keys, 'key')}, {_plural(response.store_bytes, 'byte')}",
        _members(response.members, previous, rows_max),
        *("\n  ".join([name, *map(escape_unprintable, lines)]) for name, lines in sections.items() if lines),
    ]
    return "\n\n".join(filter(None, parts))


def _first(lines: list[str], most: int) -> list[str]:
    """The first lines, and the number of the others."""
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more"]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# -- members -----------------------------------------------------------------------------------------------------------


def _members(members: Sequence[Member], previous: PreviousStatus | None, rows_max: int | None) -> str:
    present = [member for member in members if member.rank >= 0 or state_name(member.state) not in GONE]
    gone = [member for member in members if member.rank < 0 and state_name(member.state) in GONE]
    text = _rows(present, previous, rows_max) if present else "no members"
    return f"{text}\nearlier processes: {_counted(gone)}" if gone else text


def _rows(members: list[Member], previous: PreviousStatus | None, rows_max: int | None) -> str:
    shown = sorted(members, key=lambda m: (m.rank < 0, m.rank, m.name))
    if rows_max is not None and len(shown) > rows_max:
        shown = sorted(shown, key=lambda m: (_STATE_ORDER.index(state_name(m.state)), -m.behind_ms))[:rows_max]
    rates = _rates(shown, previous)
    rows = [_row(member, rates.get(member.name)) for member in shown]
    header = ("rank", "name", "state", "host", "step", "ops/s", "in ops", "behind for", "last beat", "last operation", "why")
    kept = [column for column, name in enumerate(header) if name in _ALWAYS_SHOWN or any(row[column] for row in rows)]
    text = table([header[column] for column in kept], [[row[column] for column in kept] for row in rows], right=_RIGHT_ALIGNED)
    hidden = len(members) - len(shown)
    return f"{text}\n... and {hidden} more; of all: {_counted(members)}" if hidden else text


def _counted(members: Sequence[Member]) -> str:
    states = [state_name(member.state) for member in members]
    return ", ".join(f"{states.count(state)} {state}" for state in _STATE_ORDER if state in states)


_ALWAYS_SHOWN: Final = frozenset({"rank", "name", "state", "host", "step", "last beat", "last operation", "why"})


def _rates(members: Sequence[Member], previous: PreviousStatus | None) -> dict[str, tuple[float, float]]:
    """Operations a second, and the share of time in them, by the names of those members of which both are known."""
    if previous is None or previous.seconds <= RATES_SECONDS_MIN:
        return {}
    earlier, seconds = previous.members(), previous.seconds
    rates = {}
    for member in members:
        before = earlier.get(member.name)
        if before is None or member.step < before.step or member.rank < 0 or state_name(member.state) in GONE:
            continue
        share = (member.operation_ms - before.operation_ms) / 1000 / seconds
        rates[member.name] = (member.step - before.step) / seconds, min(1.0, max(0.0, share))
    return rates


def _row(member: Member, rates: tuple[float, float] | None) -> tuple[str, ...]:
    rate, share = (f"{rates[0]:.1f}", f"{100 * rates[1]:.0f} %") if rates else ("", "")
    return (
        str(member.rank) if member.rank >= 0 else "-",
        member.name,
        state_name(member.state),
        member.host or "-",
        str(member.step),
        rate,
        share,
        f"{member.behind_ms / 1000:.1f} s" if member.behind_ms else "",
        "-" if state_name(member.state) in GONE else f"{member.beat_age_ms / 1000:.1f} s",
        member.activity or "-",
        member.reason,
    )


# -- who is slowest ----------------------------------------------------------------------------------------------------


def _slowest(members: Sequence[Member], previous: PreviousStatus | None) -> str:
    """Names the rank that is slower than the others although it works, as web/static/model.js does; empty if there is none."""
    earlier = previous.members() if previous else {}
    ranked = [member for member in members if member.rank >= 0 and state_name(member.state) not in GONE]
    computing = {member.rank: _compute_ms(member, earlier.get(member.name)) for member in ranked if member.training.steps}
    if len(computing) > 1:
        return _slowest_of(computing, "of computing in a training step")
    rates = _rates(ranked, previous)
    own = {m.rank: 1000 / rates[m.name][0] * (1 - rates[m.name][1]) for m in ranked if m.name in rates and rates[m.name][0] > 0}
    return _slowest_of(own, "between two operations")


def _compute_ms(member: Member, before: Member | None) -> float:
    """Of a training step: over those since `before`, or over all if none ended since."""
    steps, compute_ms = member.training.steps, member.training.compute_ms
    if before is not None and before.training.steps < steps:
        return (compute_ms - before.training.compute_ms) / (steps - before.training.steps)
    return compute_ms / steps


def _slowest_of(times_ms: dict[int, float], of: str) -> str:
    order = sorted(times_ms.items(), key=lambda item: -item[1])
    if len(order) < 2:
        return ""
    (rank, longest), (_, typical) = order[0], order[len(order) // 2]
    if longest < SLOW_FACTOR * typical or longest - typical < SLOW_MS_MIN:
        return ""
    own, others = (f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in (longest, typical))
    return f"The slowest is rank {rank}: {own} ms {of}, where others need {others} ms"


# -- other sections ----------------------------------------------------------------------------------------------------------


def _barrier(barrier: BarrierStatus) -> str:
    missing = ", ".join(map(str, barrier.missing_ranks)) or "none"
    last = f", the last {max(barrier.arrived_after_ms) / 1000:.1f} s after the first" if barrier.arrived_after_ms else ""
    return (
        f"{barrier.name} #{barrier.ordinal} of generation {barrier.generation}: {len(barrier.arrived_ranks)} arrived{last}, "
        f"missing ranks {missing}, open for {barrier.age_ms / 1000:.1f} s"
    )


def _stragglers(response: StatusResponse) -> list[str]:
    told = [
        f"rank {straggler.rank}: {straggler.barriers} of the last ones, waited for {straggler.waited_ms / 1000:.2f} s in all"
        for straggler in response.stragglers
    ]
    return _first(told, STRAGGLERS_SHOWN)


def _training(response: StatusResponse) -> list[str]:
    """A table of compute and wait times; the others wait for the rank that computes longest."""
    trained = sorted((m for m in response.members if m.rank >= 0 and m.training.steps), key=lambda m: m.rank)
    members = [m for m in trained if state_name(m.state) not in GONE] or trained
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
    if len(ordered) > len(rows):
        lines.append(f"... and {len(ordered) - len(rows)} more, which compute less")
    if len(means) > 1:
        slowest, others = ordered[0].rank, [times[0] for rank, times in means.items() if rank != ordered[0].rank]
        behind = means[slowest][0] - sum(others) / len(others)
        lines.append(f"rank {slowest} computes longest, {behind:.1f} ms a step more than the others' mean")
    return lines


def _generation(generation: GenerationStatus) -> str:
    end = f"; ended: {generation.end_reason}" if generation.end_reason else ""
    times = f", {_ago(generation.age_ms)} ago" if generation.HasField("age_ms") else ""
    times += f", lasted {_ago(generation.lasted_ms)}" if generation.HasField("lasted_ms") else ""
    return f"{generation.generation}: {_plural(generation.size, 'member')}{times}, {generation.reason}{end}"


def _links(response: StatusResponse, previous: PreviousStatus | None) -> list[str]:
    """Bytes a second from row to column, given two responses and a small world; otherwise the busiest links.

    Ranks that are gone send nothing any more, so for a finished job the totals are shown instead of rates; as where no link was
    told of before.
    """
    sent = _sent(response)
    if previous is None:
        return _busiest(sent, "")
    present = {member.rank for member in response.members if state_name(member.state) not in GONE}
    before = _sent(previous.response)
    rates = {
        pair: (kind, max(0, count - before[pair][1]) / previous.seconds)
        for pair, (kind, count) in sent.items()
        if pair[0] in present and pair in before  # one may be told of long after it began: as one of the busiest of many
    }
    if not rates:
        return _busiest(sent, "")
    size = max(max(pair) for pair in sent) + 1
    if size > MATRIX_RANKS_MAX:
        return _busiest(rates, "/s")
    header = ["to", *map(str, range(size))]
    rows = [
        [f"from {row}", *(_bytes(rates[row, column][1]) if (row, column) in rates else "" for column in range(size))]
        for row in range(size)
    ]
    kinds = ", ".join(sorted({kind for kind, _ in rates.values()}))
    return [f"bytes a second by {kinds}", *table(header, rows, right=frozenset(header[1:])).splitlines()]


def _sent(response: StatusResponse) -> dict[tuple[int, int], tuple[str, int]]:
    return {
        (member.rank, link.peer_rank): (link.kind, link.sent_bytes)
        for member in response.members
        if member.rank >= 0
        for link in member.links
    }


def _busiest(links: Mapping[tuple[int, int], tuple[str, float]], unit: str) -> list[str]:
    order = sorted(links.items(), key=lambda item: (-item[1][1], item[0]))
    told = [f"rank {source} to {target} by {kind}: {_bytes(count)}{unit}" for (source, target), (kind, count) in order]
    return _first(told, LINKS_SHOWN)


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
