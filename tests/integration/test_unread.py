"""Clients that leave unread what they asked for, and ask again: a coordinator holds so much for them, and serves the others."""

import queue
import time

import grpc
import pytest
from ferrorpc_coordinator.unread import UNREAD_BYTES_MAX

from benchmarks.floods import MEBIBYTE, resident_bytes
from ferrorpc.errors import CoordinatorUnavailableError, LimitExceededError
from ferrorpc.v1 import session_pb2, session_pb2_grpc, store_pb2
from ferrorpc.wire import options, status
from tests.integration.coordinator_process import Client, channel_to, coordinator
from tests.waiting import eventually

VALUE = bytes(MEBIBYTE)
MEMORY_MAX = 6 * UNREAD_BYTES_MAX
"""gRPC has copies of its own, and malloc keeps some of what was freed. All that the tests ask for would be twice as much."""
GET = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="large"))


@pytest.fixture(scope="module")
def process():
    with coordinator() as running:
        yield running


@pytest.fixture
def channels(process):
    """Channels of one client, each with room for 60 calls. Its windows stay small, as a hostile client's would."""
    small = [*options.session_channel(), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
    made = [grpc.insecure_channel(process.address, options=small) for _ in range(3)]
    yield made
    for channel in made:
        channel.close()


def set_large(process, job):
    with Client(process.address, "setter", job=job) as member:
        member.store(set=store_pb2.SetOperation(key="large", value=VALUE))


def test_answers_beyond_what_a_job_may_leave_unread_are_refused_until_room_is_made(process, channels):
    set_large(process, "a")
    set_large(process, "b")
    before = resident_bytes(process.process.pid)
    request = session_pb2.UnaryStoreRequest(job="b", request=GET)
    opened = [  # as streams, because gRPC itself reads the answers of unary calls
        channel.stream_stream("/ferrorpc.v1.CoordinatorService/Store")(iter([request.SerializeToString()]), timeout=60)
        for channel in channels
        for _ in range(60)
    ]
    with channel_to(process.address) as channel:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)

        def refusal(job):
            try:
                stub.Store(session_pb2.UnaryStoreRequest(job=job, request=GET), timeout=10)
            except grpc.RpcError as error:
                return status.error_of(error)
            return None

        refused = eventually(lambda: refusal("b"))
        assert isinstance(refused, LimitExceededError)
        assert "'b' leave unread" in refused.message
        assert refusal("a") is None
        small = session_pb2.UnaryStoreRequest(
            job="b", request=store_pb2.StoreRequest(add=store_pb2.AddOperation(key="n", amount=1))
        )
        assert stub.Store(small, timeout=10).response.number == 1
        assert resident_bytes(process.process.pid) - before < MEMORY_MAX
        for call in opened:
            call.cancel()
        eventually(lambda: refusal("b") is None)


def test_calls_that_wait_for_the_same_value_all_get_it_and_so_does_who_sets_it(process):
    """Together they are more than a job may leave unread, but these read."""
    wait = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="awaited", wait_ms=20_000))
    won = store_pb2.CompareSetOperation(key="awaited", expect_absent=True, value=VALUE)
    with channel_to(process.address) as channel:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        waiting = [
            stub.Store.future(session_pb2.UnaryStoreRequest(job="e", client_id=f"{number}", request=wait), timeout=30)
            for number in range(40)
        ]
        time.sleep(0.5)
        request = store_pb2.StoreRequest(request_id=1, compare_set=won)
        answer = stub.Store(session_pb2.UnaryStoreRequest(job="e", client_id="setter", request=request), timeout=20)
        assert answer.response.found
        assert [call.result().response.value == VALUE for call in waiting] == [True] * 40


def test_a_session_that_is_left_unread_and_resumed_again_and_again_is_refused(process, channels):
    set_large(process, "c")
    set_large(process, "d")
    before, resume, sequence, left = resident_bytes(process.process.pid), "", 0, []

    def leave_another():
        nonlocal resume, sequence
        outgoing = queue.SimpleQueue()
        stub = session_pb2_grpc.CoordinatorServiceStub(channels[len(left) % len(channels)])
        call = stub.Session(iter(outgoing.get, None))
        left.append((call, outgoing))
        hello = session_pb2.Hello(protocol_version=1, job="c", name="x", instance_id="i", resume_token=resume)
        outgoing.put(session_pb2.ClientFrame(hello=hello))
        try:
            resume = next(call).welcome.resume_token
        except grpc.RpcError as error:
            return status.error_of(error)
        for _ in range(3):
            sequence += 1
            outgoing.put(session_pb2.ClientFrame(sequence=sequence, store=GET))
        return None

    refused = eventually(leave_another)
    assert isinstance(refused, CoordinatorUnavailableError)  # so that it tries again
    assert "'c' left" in refused.message
    assert resident_bytes(process.process.pid) - before < MEMORY_MAX
    Client(process.address, "other", job="d").greeted().drop()
    for call, outgoing in left:
        outgoing.put(None)
        call.cancel()
    eventually(lambda: Client(process.address, "x", job="c", instance="i", resume=resume).greeted() or True)
