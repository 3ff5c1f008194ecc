"""Requests that await their answer."""

from collections.abc import Callable
from typing import Any

import pytest

from ferrorpc.coordination.connection import REPLY_MARGIN_SECONDS
from ferrorpc.coordination.pending_requests import RETURN_MILLISECONDS, PendingRequests, Request, check_size
from ferrorpc.errors import LimitExceededError, PeerLostError, StaleGenerationError
from ferrorpc.guard import Latch
from ferrorpc.v1 import barrier_pb2, nccl_pb2, rendezvous_pb2, session_pb2, store_pb2


def describe() -> dict:
    return {"describe": session_pb2.DescribeRequest()}


def added(requests: PendingRequests, latch: Latch | None = None, **body: Any) -> Request:
    request = Request(session_pb2.ClientFrame(**body or describe()), "a request", latch)
    requests.add(request, 0.0)
    return request


def test_numbers_count_from_one_and_answers_find_their_request_in_any_order():
    requests = PendingRequests()
    first, second = (added(requests) for _ in range(2))
    assert [r.frame.sequence for r in (first, second)] == [1, 2]
    answer = session_pb2.DescribeResponse()
    requests.complete(2, answer)
    assert (first.outcome, second.outcome) == (None, answer)
    assert requests.to_send() == [first]


def test_an_answer_counts_once_and_one_for_nobody_is_dropped():
    requests = PendingRequests()
    request = added(requests)
    first = session_pb2.DescribeResponse()
    requests.complete(1, first)
    requests.complete(1, StaleGenerationError("too late"))
    requests.complete(77, first)
    assert request.outcome is first


def test_what_is_unanswered_is_sent_again_in_the_order_of_its_numbers():
    requests = PendingRequests()
    five = [added(requests) for _ in range(5)]
    requests.complete(2, session_pb2.DescribeResponse())
    requests.drop(five[3])
    assert [request.frame.sequence for request in requests.to_send()] == [1, 3, 5]


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "followed by another"])
@pytest.mark.parametrize("answered", [True, False], ids=["answered", "given up"])
def test_what_the_coordinator_keeps_in_memory_only_is_sent_until_its_generation_is_over(ends: bool, answered: bool):
    latch, requests = Latch(), PendingRequests()
    lost = added(requests, latch, report=session_pb2.ReportRequest(link_lost=session_pb2.LinkLost(peer_rank=1)))
    offer = added(requests, latch, comm_bootstrap=nccl_pb2.CommBootstrapRequest(unique_ids=[bytes(128)]))
    taken = added(requests, latch, comm_bootstrap=nccl_pb2.CommBootstrapRequest())
    for request in (lost, offer, taken):
        if answered:
            requests.complete(request.frame.sequence, session_pb2.ReportResponse())
        else:
            requests.drop(request)
    assert requests.to_send() == [lost, offer]
    if ends:
        latch.trip(PeerLostError(1, "signal 9"))
    else:
        requests.drop_volatile()
    assert requests.to_send() == []


def test_the_end_of_its_generation_is_a_requests_verdict_unless_it_was_answered():
    latch, requests = Latch(), PendingRequests()
    answered, open_, free = (added(requests, bound) for bound in (latch, latch, None))
    answer = session_pb2.DescribeResponse()
    requests.complete(1, answer)
    cause = PeerLostError(1, "signal 9")
    latch.trip(cause)
    assert (answered.outcome, open_.outcome, free.outcome) == (answer, cause, None)


def test_some_can_be_failed_and_the_others_go_on():
    requests = PendingRequests()
    bound, free = added(requests, Latch()), added(requests)
    gone = StaleGenerationError("gone")
    requests.fail(gone, lambda request: request.latch is not None)
    assert (bound.outcome, free.outcome) == (gone, None)


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ({"join": rendezvous_pb2.JoinRequest(timeout_ms=9000)}, lambda frame: frame.join.timeout_ms),
        ({"barrier": barrier_pb2.BarrierRequest(timeout_ms=9000)}, lambda frame: frame.barrier.timeout_ms),
        ({"comm_bootstrap": nccl_pb2.CommBootstrapRequest(timeout_ms=9000)}, lambda frame: frame.comm_bootstrap.timeout_ms),
        ({"store": store_pb2.StoreRequest(get=store_pb2.GetOperation(wait_ms=9000))}, lambda frame: frame.store.get.wait_ms),
        ({"store": store_pb2.StoreRequest(wait=store_pb2.WaitOperation(wait_ms=9000))}, lambda frame: frame.store.wait.wait_ms),
    ],
)
def test_what_is_sent_again_waits_for_the_rest_of_its_time(body: dict[str, Any], waits: Callable[[Any], int]):
    """But for as long as others may need to be back, too: whoever is back first would time out for all."""
    request = added(PendingRequests(), **body)
    assert [waits(request.frame_after(seconds)) for seconds in (0.0, 2.5, 9.5)] == [9000, 6500, RETURN_MILLISECONDS]
    assert waits(request.frame) == 9000, "the one that was sent may still be written"
    assert RETURN_MILLISECONDS < 1000 * REPLY_MARGIN_SECONDS


@pytest.mark.parametrize("asked_ms", [0, 500])
def test_what_is_sent_again_waits_no_longer_than_it_was_to(asked_ms: int):
    wait = store_pb2.StoreRequest(get=store_pb2.GetOperation(wait_ms=asked_ms))
    request = added(PendingRequests(), store=wait)
    assert request.frame_after(0.4).store.get.wait_ms == asked_ms


@pytest.mark.parametrize("body", [describe(), {"store": store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k"))}])
def test_what_waits_for_nobody_is_sent_again_as_it_was(body: dict[str, Any]):
    request = added(PendingRequests(), **body)
    assert request.frame_after(2.5) == request.frame


def test_a_value_of_the_largest_size_fits_and_any_other_request_is_held_to_less():
    value = bytes(1 << 20)
    largest = session_pb2.ClientFrame(store=store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k" * 512, value=value)))
    check_size(Request(largest, "store.set"))
    with pytest.raises(LimitExceededError, match="describe"):
        check_size(Request(session_pb2.ClientFrame(describe=session_pb2.DescribeRequest(ranks=range(1 << 17))), "describe"))
