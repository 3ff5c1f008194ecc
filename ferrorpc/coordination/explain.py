"""Sentences about members, and about what a request to the coordinator waits for."""

from __future__ import annotations

from typing import Final

from ferrorpc.coordination.base import MemberReport
from ferrorpc.coordination.pending_requests import Request
from ferrorpc.coordination.session_stream import SessionStream
from ferrorpc.errors import FerroError
from ferrorpc.v1 import identity_pb2, session_pb2 as wire
from ferrorpc.wire.member_states import state_name

STATUS_SECONDS: Final = 1.0
NAMED_MAX: Final = 8
_UNHEALTHY: Final = ("stalled", "suspect", "dead", "left")


def member_report(member: identity_pb2.Member) -> MemberReport:
    """What the coordinator knows of a member."""
    state, beat_age = state_name(member.state), member.beat_age_ms / 1000
    return MemberReport(member.rank, member.name, member.host, state, member.step, beat_age, member.activity, member.reason)


def explain_wait(request: Request, stream: SessionStream | None, status_request: wire.StatusRequest) -> str:
    """What a request waits for, and for whom, as the coordinator sees it now. Never raises: it is for a log line."""
    if stream is None:
        return "there is no connection"
    try:
        status = stream.status(status_request, STATUS_SECONDS)
    except FerroError as error:
        return f"the coordinator is there, but its status is not: {error.message}"
    kind = request.frame.WhichOneof("body")
    if kind == "join":
        reason = status.waiting_reason or "the round is about to close"
    elif kind == "barrier":
        reason = _barrier_reason(request, status)
    elif kind == "store" and request.frame.store.WhichOneof("operation") in ("get", "wait"):
        reason = "nobody has set what is waited for"
    else:
        reason = "no answer yet"
    # Only a rendezvous may wait for one without a rank. Others have left a long job one after the other.
    concerned = [member for member in status.members if kind == "join" or member.rank >= 0]
    unhealthy = [str(report) for report in map(member_report, concerned) if report.state in _UNHEALTHY]
    return "; ".join([reason, *_named([sentence for sentence in unhealthy if sentence not in reason])])


def _barrier_reason(request: Request, status: wire.StatusResponse) -> str:
    asked = request.frame.barrier
    by_rank = {member.rank: str(member_report(member)) for member in status.members if member.rank >= 0}
    for barrier in status.barriers:
        if (barrier.name, barrier.generation, barrier.ordinal) == (asked.name, asked.generation, asked.ordinal):
            missing = [by_rank.get(rank, f"rank {rank}") for rank in barrier.missing_ranks]
            return "; ".join([f"{len(barrier.arrived_ranks)} have arrived, {len(missing)} have not", *_named(missing)])
    return "the coordinator has no such barrier open; if all have arrived, the answer waits for the disk of its journal"


def _named(sentences: list[str]) -> list[str]:
    return sentences[:NAMED_MAX] + ([f"and {len(sentences) - NAMED_MAX} more"] if len(sentences) > NAMED_MAX else [])
