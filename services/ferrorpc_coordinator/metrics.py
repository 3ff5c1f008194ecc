"""What the coordinator counts, and how Prometheus gets to read it.

Counting is an addition to a plain attribute on the event loop. The Prometheus client is loaded only when an HTTP port is
given; it reads the numbers when it is scraped, and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2

_BOUNDS_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of values by upper bound, as Prometheus wants them."""

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
        """(upper bound, how many were at most that), the last being "+Inf"."""
        running, result = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            result.append((bound, float(running)))
        return result


@dataclass
class Counters:
    """Everything that is counted. Written on the event loop only."""

    frames_received: int = 0
    heartbeats: int = 0
    handled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(method, gRPC status code) -> how many calls ended so."""
    generations_broken: Counter[str] = field(default_factory=Counter)
    """Error code of the first cause -> how many generations it ended."""
    member_changes: Counter[str] = field(default_factory=Counter)
    """State a member of a living generation went into -> how often."""
    barrier_spread: Histogram = field(default_factory=Histogram)
    """Seconds between first and last arrival of a released barrier."""
    loop_lag: Histogram = field(default_factory=Histogram)
    """Seconds the event loop was late."""

    def observe(self, frame: session_pb2.ServerFrame) -> None:
        """Counts what an answer or event tells. To be called once for a frame, however many it is sent to."""
        if frame.HasField("result"):
            if frame.result.HasField("barrier"):
                self.barrier_spread.observe(frame.result.barrier.spread_ms / 1e3)
        elif frame.HasField("event"):
            event = frame.event
            if event.HasField("broken"):
                self.generations_broken[code_label(event.broken.cause.code)] += 1
            elif event.HasField("member"):
                self.member_changes[state_label(event.member.state)] += 1


def state_label(state: identity_pb2.MemberState.ValueType) -> str:
    """A member's state as a label."""
    return identity_pb2.MemberState.Name(state).removeprefix("MEMBER_STATE_").lower()


def code_label(code: error_pb2.ErrorCode.ValueType) -> str:
    """An error's code as a label."""
    return error_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()


@dataclass(frozen=True, slots=True)
class JobGauges:
    """What a job looks like at the moment of a scrape."""

    members: Mapping[str, int]
    generation: int
    store_keys: int
    store_bytes: int

    @classmethod
    def of(cls, status: session_pb2.StatusResponse) -> JobGauges:
        """From what the state tells of a job."""
        members = Counter(state_label(member.state) for member in status.members)
        newest = max((generation.generation for generation in status.generations), default=0)
        return cls(members, newest, status.store_keys, status.store_bytes)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the coordinator looks like at the moment of a scrape."""

    sessions: int
    journal_commits: int
    journal_full: bool
    jobs: Mapping[str, JobGauges]


class Collector:
    """The metric families, as a registry of the Prometheus client asks for them at each scrape. On the event loop only."""

    def __init__(self, counters: Counters, gauges: Callable[[], Gauges]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Any]:
        """The metric families, as a Prometheus collector yields them."""
        yield from self._collect_counters()
        yield from self._collect_gauges()

    def describe(self) -> list[Any]:
        """Nothing: the registry need not collect at registration."""
        return []

    def _collect_counters(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counters = self._counters
        yield CounterMetricFamily("ferrorpc_session_frames", "Frames received on session streams", counters.frames_received)
        yield CounterMetricFamily("ferrorpc_heartbeats", "Beats received", counters.heartbeats)
        for name, text, labels, counted in (
            ("ferrorpc_grpc_handled", "Calls ended, by method and code", ("method", "code"), counters.handled),
            ("ferrorpc_generations_broken", "Generations ended, by first cause", ("cause",), counters.generations_broken),
            ("ferrorpc_member_changes", "Changes of state within living generations", ("state",), counters.member_changes),
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

    def _collect_gauges(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._gauges()
        yield GaugeMetricFamily("ferrorpc_sessions", "Open session streams", now.sessions)
        yield CounterMetricFamily("ferrorpc_journal_commits", "Groups made durable", now.journal_commits)
        yield GaugeMetricFamily("ferrorpc_journal_full", "1 while the journal's disk is full", float(now.journal_full))
        members = GaugeMetricFamily("ferrorpc_members", "Members by state", labels=("job", "state"))
        generation = GaugeMetricFamily("ferrorpc_generation", "Newest generation", labels=("job",))
        keys = GaugeMetricFamily("ferrorpc_store_keys", "Keys in the store", labels=("job",))
        size = GaugeMetricFamily("ferrorpc_store_bytes", "Bytes in the store", labels=("job",))
        for job, gauges in now.jobs.items():
            for state, count in gauges.members.items():
                members.add_metric((job, state), count)
            generation.add_metric((job,), gauges.generation)
            keys.add_metric((job,), gauges.store_keys)
            size.add_metric((job,), gauges.store_bytes)
        yield from (members, generation, keys, size)
