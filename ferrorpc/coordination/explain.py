"""What is known of a member, and of what somebody waits for, in sentences."""

from __future__ import annotations

from typing import Final

from ferrorpc.coordination.base import MemberReport
from ferrorpc.coordination.requests import Request
from ferrorpc.coordination.stream import Stream
from ferrorpc.errors import FerroError
from ferrorpc.v1 import identity_pb2, session_pb2 as wire

STATUS_SECONDS: Final = 1.0
NAMED_MAX: Final = 8
_NOT_WELL: Final = ("stalled", "suspect", "dead", "left")


def report_of(member: identity_pb2.Member) -> MemberReport:
    """A member as the coordinator knows it."""
    known = member.state in identity_pb2.MemberState.values()  # a newer coordinator may have more
    state = identity_pb2.MemberState.Name(member.state).removeprefix("MEMBER_STATE_").lower() if known else "unknown"
    return MemberReport(
        member.rank, member.name, member.host, state, member.step, member.beat_age_ms / 1000, member.activity, member.reason
    )


def explanation(request: Request, stream: Stream | None, question: wire.StatusRequest) -> str:
    """What a request waits for, and on whom, as the coordinator sees it now. Never raises: it is made for a log line."""
    if stream is None:
        return "there is no connection"
    try:
        status = stream.status(question, STATUS_SECONDS)
    except FerroError as error:
        return f"the coordinator is there, but its status is not: {error.message}"
    kind = request.frame.WhichOneof("body")
    if kind == "join":
        said = status.waiting_reason or "the round is about to close"
    elif kind == "barrier":
        said = _of_barrier(request, status)
    elif kind == "store":
        said = "nobody has set what is waited for"
    else:
        said = "no answer yet"
    unwell = [str(report_of(member)) for member in status.members if report_of(member).state in _NOT_WELL]
    return "; ".join([said, *_named(unwell)])


def _of_barrier(request: Request, status: wire.StatusResponse) -> str:
    asked = request.frame.barrier
    by_rank = {member.rank: str(report_of(member)) for member in status.members if member.rank >= 0}
    for barrier in status.barriers:
        if (barrier.name, barrier.generation, barrier.ordinal) == (asked.name, asked.generation, asked.ordinal):
            missing = [by_rank.get(rank, f"rank {rank}") for rank in barrier.missing_ranks]
            return "; ".join([f"{len(barrier.arrived_ranks)} have arrived, {len(missing)} have not", *_named(missing)])
    return "the coordinator has no such barrier open"


def _named(sentences: list[str]) -> list[str]:
    return sentences[:NAMED_MAX] + ([f"and {len(sentences) - NAMED_MAX} more"] if len(sentences) > NAMED_MAX else [])
