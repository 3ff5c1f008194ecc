"""The coordinator's metrics for Prometheus.

A count is an addition to a plain attribute on the event loop. The Prometheus client is loaded only if an HTTP port is
given; it reads the numbers when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from ferrorpc.versions import own_version, version_of
from ferrorpc.wire.member_states import state_name
from ferrorpc_coordinator.state.effects import Note
from ferrorpc_coordinator.state.job import Job
from ferrorpc_coordinator.state.settings import SECOND

_BOUNDS_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MEMBERS_BY_RANK_MAX: Final = 256
"""Larger jobs have no series per rank; the status page shows their ranks."""


class Histogram:
    """Counts of values by upper bound, as in a Prometheus histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = _BOUNDS_SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it); the last bound is "+Inf"."""
        running, result = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            result.append((bound, float(running)))
        return result


@dataclass
class Counters:
    """All counters. Written on the event loop only."""

    frames_received: int = 0
    heartbeats: int = 0
    handled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(method, gRPC status code) -> number of calls."""
    first_causes: Counter[str] = field(default_factory=lambda: _zeros(map(code_label, error_pb2.ErrorCode.values())))
    """Error code of the first cause -> number of generations it ended."""
    member_changes: Counter[str] = field(default_factory=lambda: _zeros(map(state_name, identity_pb2.MemberState.values())))
    """New state of a member -> number of changes; "active" where one is back."""
    request_errors: Counter[str] = field(default_factory=lambda: _zeros(map(code_label, error_pb2.ErrorCode.values())))
    """Error code -> number of session requests answered with it."""
    barrier_spread: Histogram = field(default_factory=Histogram)
    """Seconds between the first and last arrival at released barriers."""
    loop_lag: Histogram = field(default_factory=Histogram)
    """How late timers fired, in seconds."""

    def observe(self, frame: session_pb2.ServerFrame, recipients: int) -> None:
        """Counts an answer: a barrier once, an error for each recipient. To be called once per frame."""
        if frame.HasField("result"):
            if frame.result.HasField("barrier"):
                self.barrier_spread.observe(frame.result.barrier.spread_ms / 1e3)
            elif frame.result.HasField("error"):
                self.request_errors[code_label(frame.result.error.code)] += recipients

    def noted(self, note: Note) -> None:
        """Counts what happened to a generation or a member, whether or not anybody is left to be told."""
        if note.kind == "broken":
            self.first_causes[code_label(note.code)] += 1
        elif note.state:
            self.member_changes[note.state] += 1


def _zeros(labels: Iterable[str]) -> Counter[str]:
    """Counters that start at 0: Prometheus sees no increase in a first value."""
    return Counter(dict.fromkeys((label for label in labels if label != "unspecified"), 0))


def code_label(code: error_pb2.ErrorCode.ValueType) -> str:
    """An error's code as a label. Codes of later versions, which a member may report, share one label."""
    if code not in error_pb2.ErrorCode.values():
        return "unknown"
    return error_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()


def members_by_state(job: Job) -> Counter[str]:
    """How many members a job has in each state."""
    return Counter(state_name(job.members.state(member, job.rendezvous.joining(member))) for member in job.members)


def beat_ages(job: Job) -> dict[int, float]:
    """Rank -> seconds since its last frame, if that came since the start. Empty for more than MEMBERS_BY_RANK_MAX members."""
    alive = [member for member in job.members if member.rank >= 0 and member.alive]
    if len(alive) > MEMBERS_BY_RANK_MAX:
        return {}
    return {member.rank: max(0, job.context.now - member.last_heard) / SECOND for member in alive if not member.recovered}


def longest_behind_seconds(job: Job) -> float:
    """For how long a rank has been behind; 0 if none is."""
    return max(job.behind().durations.values(), default=0) / SECOND


@dataclass(frozen=True, slots=True)
class Gauges:
    """The coordinator's gauges at the time of a scrape."""

    sessions: int
    journal_commits: int
    journal_full: bool
    journal_waits_ns: int
    certificate_ends_at: float | None
    """In seconds since the epoch; None if unknown."""
    jobs: Mapping[str, Job]
    """Read directly: a full status also lists former members, and each scrape takes time on the event loop."""


class Collector:
    """Collects the metric families for a registry of the Prometheus client, at each scrape. On the event loop only."""

    def __init__(self, counters: Counters, gauges: Callable[[], Gauges]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Any]:
        """Yields the metric families."""
        yield build_info()
        yield from self._collect_counters()
        now = self._gauges()
        yield from _collect_coordinator(now)
        yield from _collect_jobs(now.jobs)

    def describe(self) -> list[Any]:
        """Returns nothing, so that the registry does not collect at registration."""
        return []

    def _collect_counters(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counters = self._counters
        yield CounterMetricFamily("ferrorpc_session_frames", "Frames received on session streams", counters.frames_received)
        yield CounterMetricFamily("ferrorpc_heartbeats", "Beats received", counters.heartbeats)
        for name, text, labels, counted in (
            ("ferrorpc_grpc_handled", "Calls ended, by method and code", ("method", "code"), counters.handled),
            ("ferrorpc_request_errors", "Requests answered with an error, by its code", ("code",), counters.request_errors),
            ("ferrorpc_first_causes", "Generations of any job that broke, by first cause", ("cause",), counters.first_causes),
            ("ferrorpc_member_changes", "Changes of members' states", ("state",), counters.member_changes),
        ):
            family = CounterMetricFamily(name, text, labels=labels)
            for key, value in list(counted.items()):
                family.add_metric(key if isinstance(key, tuple) else (key,), value)
            yield family
        for name, text, histogram in (
            ("ferrorpc_barrier_spread_seconds", "First to last arrival of released barriers", counters.barrier_spread),
            ("ferrorpc_loop_lag_seconds", "How late the event loop was", counters.loop_lag),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)


def build_info() -> Any:
    """A gauge of 1 with the versions as labels."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily("ferrorpc_build_info", "1, with versions as labels", labels=("version", "grpcio", "protobuf"))
    family.add_metric([own_version(), version_of("grpcio"), version_of("protobuf")], 1)
    return family


def _collect_coordinator(now: Gauges) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield GaugeMetricFamily("ferrorpc_sessions", "Open session streams", now.sessions)
    yield CounterMetricFamily("ferrorpc_journal_commits", "Groups made durable", now.journal_commits)
    yield GaugeMetricFamily("ferrorpc_journal_full", "1 while the journal's disk is full", float(now.journal_full))
    waits_seconds = now.journal_waits_ns / SECOND
    yield GaugeMetricFamily("ferrorpc_journal_waiting_seconds", "How long its disk has not answered", waits_seconds)
    if now.certificate_ends_at is not None:
        name, text = "ferrorpc_certificate_expiry_timestamp_seconds", "When the coordinator's certificate ends, since the epoch"
        yield GaugeMetricFamily(name, text, now.certificate_ends_at)


def _collect_jobs(jobs: Mapping[str, Job]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    members = GaugeMetricFamily("ferrorpc_members", "Members by state", labels=("job", "state"))
    ages = GaugeMetricFamily("ferrorpc_heartbeat_age_seconds", "Since the last frame from a rank", labels=("job", "rank"))
    broken = CounterMetricFamily("ferrorpc_generations_broken", "Generations that broke", labels=("job",))
    for name, job in jobs.items():
        for state, count in members_by_state(job).items():
            members.add_metric((name, state), count)
        for rank, age in beat_ages(job).items():
            ages.add_metric((name, str(rank)), age)
        broken.add_metric((name,), job.generations.broken_count)
    yield from (members, ages, broken)
    for metric, text, value in _JOB_GAUGES:
        family = GaugeMetricFamily(metric, text, labels=("job",))
        for name, job in jobs.items():
            family.add_metric((name,), value(job))
        yield family


_JOB_GAUGES: Final[tuple[tuple[str, str, Callable[[Job], float]], ...]] = (
    ("ferrorpc_generation", "Newest generation", lambda job: job.context.newest_generation),
    ("ferrorpc_world_size", "Members of the newest generation", lambda job: len(job.generations.newest.members)),
    ("ferrorpc_open_barriers", "Named barriers that wait for somebody", lambda job: len(job.barriers)),
    ("ferrorpc_longest_barrier_seconds", "Age of the oldest open barrier", lambda job: job.barriers.longest_ns / SECOND),
    ("ferrorpc_longest_behind_seconds", "How long a rank begins no operation, others waiting or ahead", longest_behind_seconds),
    ("ferrorpc_rendezvous_seconds", "How long members have waited for one", lambda job: job.rendezvous.longest_ns / SECOND),
    ("ferrorpc_store_keys", "Keys in the store", lambda job: len(job.store.keyspace)),
    ("ferrorpc_store_bytes", "Bytes in the store", lambda job: job.store.keyspace.bytes),
)
