"""What a request that takes long is said to wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ferrorpc.coordination.explain import explain_wait, member_report
from ferrorpc.errors import CoordinatorUnavailableError
from ferrorpc.v1 import identity_pb2
from ferrorpc.v1.barrier_pb2 import BarrierRequest
from ferrorpc.v1.rendezvous_pb2 import JoinRequest
from ferrorpc.v1.session_pb2 import BarrierStatus, ClientFrame, DescribeRequest, StatusRequest, StatusResponse
from ferrorpc.v1.store_pb2 import SetOperation, StoreRequest, WaitOperation


def said(status: StatusResponse | None = None, **body: Any) -> str:
    """What is said of a request with this body where the coordinator has this status."""
    request = SimpleNamespace(frame=ClientFrame(**body))
    stream = SimpleNamespace(status=lambda question, seconds: status or StatusResponse())
    return explain_wait(request, stream, StatusRequest(job="j"))


def member(rank: int, state: int = identity_pb2.MEMBER_STATE_ACTIVE) -> identity_pb2.Member:
    return identity_pb2.Member(rank=rank, name=f"box-{rank}", state=state, beat_age_ms=1500)


GONE = "the coordinator has no such barrier open; if all have arrived, the answer waits for the disk of its journal"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"join": JoinRequest()}, "the round is about to close"),
        ({"store": StoreRequest(wait=WaitOperation())}, "nobody has set what is waited for"),
        ({"store": StoreRequest(set=SetOperation())}, "no answer yet"),
        ({"describe": DescribeRequest()}, "no answer yet"),
        ({"barrier": BarrierRequest(name="epoch", generation=1, ordinal=2)}, GONE),
    ],
)
def test_where_the_status_says_nothing_of_it_the_kind_of_request_does(body, words):
    assert said(**body) == words


def test_a_round_is_explained_by_the_coordinators_reason():
    assert said(StatusResponse(waiting_reason="1 of 2 joined"), join=JoinRequest()) == "1 of 2 joined"


def test_of_several_uses_of_a_barrier_the_one_asked_for_is_told_with_who_is_missing():
    barriers = [
        BarrierStatus(name="epoch", generation=1, ordinal=1, arrived_ranks=[2], missing_ranks=[0]),
        BarrierStatus(name="epoch", generation=1, ordinal=2, arrived_ranks=[0], missing_ranks=[1, 2, 3]),
    ]
    members = [member(0), member(1), member(2, identity_pb2.MEMBER_STATE_STALLED)]
    status = StatusResponse(barriers=barriers, members=members)
    text = said(status, barrier=BarrierRequest(name="epoch", generation=1, ordinal=2))
    beat = "last beat 1.5 s ago, step 0"
    assert text == f"1 have arrived, 3 have not; rank 1 (box-1): active, {beat}; rank 2 (box-2): stalled, {beat}; rank 3"


def test_members_that_are_not_well_are_named_and_at_most_eight_of_them():
    members = [member(0), *(member(rank, identity_pb2.MEMBER_STATE_DEAD) for rank in range(1, 11))]
    parts = said(StatusResponse(members=members), store=StoreRequest()).split("; ")
    assert parts[1].startswith("rank 1 (box-1): dead")
    assert (len(parts), parts[-1]) == (1 + 8 + 1, "and 2 more")
    assert len(said(StatusResponse(members=members[:9]), store=StoreRequest()).split("; ")) == 1 + 8


@pytest.mark.parametrize("state", [identity_pb2.MEMBER_STATE_DEAD, identity_pb2.MEMBER_STATE_LEFT])
def test_those_who_went_earlier_are_told_of_where_a_rendezvous_may_wait_for_them_alone(state: identity_pb2.MemberState) -> None:
    status = StatusResponse(members=[member(0), member(-1, state)], waiting_reason="1 of 2 joined")
    assert "box--1" in said(status, join=JoinRequest())
    assert said(status, store=StoreRequest()) == "no answer yet"


def test_a_state_that_a_newer_coordinator_has_is_unknown():
    assert member_report(identity_pb2.Member(rank=0, name="a", state=99)).state == "unknown"


def test_without_a_connection_or_a_status_that_is_what_is_said():
    def nobody(question: StatusRequest, seconds: float) -> StatusResponse:
        raise CoordinatorUnavailableError("nobody there")

    request = SimpleNamespace(frame=ClientFrame(store=StoreRequest()))
    assert explain_wait(request, None, StatusRequest()) == "there is no connection"
    text = explain_wait(request, SimpleNamespace(status=nobody), StatusRequest())
    assert text == "the coordinator is there, but its status is not: nobody there"
