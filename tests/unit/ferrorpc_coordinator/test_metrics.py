"""What is counted, and under which bound and label."""

from ferrorpc_coordinator.metrics import Counters, Histogram, JobGauges

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import identity_pb2, session_pb2


def test_a_value_counts_under_each_bound_that_it_does_not_pass():
    histogram = Histogram((0.5, 2.0))
    for value in (0.0, 0.5, 0.6, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.buckets() == [("0.5", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 5.2


def test_answers_are_counted_by_what_they_tell():
    counters = Counters()
    counters.observe(session_pb2.ServerFrame(result={"barrier": {"spread_ms": 1500}}))
    counters.observe(session_pb2.ServerFrame(result={"error": {"code": int(ErrorCode.BARRIER_TIMEOUT)}}))
    counters.observe(session_pb2.ServerFrame(event={"standings": {"members": [{"state": identity_pb2.MEMBER_STATE_STALLED}]}}))
    assert counters.barrier_spread.total == 1.5
    assert +counters.request_errors == {"barrier_timeout": 1}
    assert +counters.member_changes == {"stalled": 1}
    assert not +counters.generations_broken


def test_what_has_not_happened_yet_is_counted_as_zero():
    """Prometheus sees no increase in the first value of a series that was not there before."""
    counters = Counters()
    assert counters.generations_broken["peer_lost"] == counters.member_changes["dead"] == 0
    assert {"peer_lost", "collective_mismatch"} <= set(counters.generations_broken)
    assert {"dead", "stalled"} <= set(counters.member_changes)
    assert "barrier_timeout" in counters.request_errors


def test_only_who_is_there_has_an_age():
    states = (
        identity_pb2.MEMBER_STATE_ACTIVE,
        identity_pb2.MEMBER_STATE_STALLED,
        identity_pb2.MEMBER_STATE_SUSPECT,
        identity_pb2.MEMBER_STATE_DEAD,
        identity_pb2.MEMBER_STATE_LEFT,
    )
    members = [identity_pb2.Member(rank=rank, state=state, beat_age_ms=250) for rank, state in enumerate(states)]
    waiting = identity_pb2.Member(rank=-1, state=identity_pb2.MEMBER_STATE_WAITING)
    gauges = JobGauges.of(session_pb2.StatusResponse(members=[*members, waiting]))
    assert gauges.beat_age_seconds == {0: 0.25, 1: 0.25, 2: 0.25}
    assert gauges.members == {"active": 1, "stalled": 1, "suspect": 1, "dead": 1, "left": 1, "waiting": 1}
