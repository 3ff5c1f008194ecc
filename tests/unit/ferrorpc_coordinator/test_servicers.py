"""The RPCs over a driver and a call of their own: who calls, and who says nothing."""

import asyncio
import contextlib
import os
import sys
from functools import partial

import grpc
import grpc.aio
import pytest
from ferrorpc_coordinator import first_message
from ferrorpc_coordinator.metrics import Counters
from ferrorpc_coordinator.send_queue import SendQueue
from ferrorpc_coordinator.servicers import SMALL_ANSWER_BYTES, CoordinatorServicer, compact
from ferrorpc_coordinator.unread import ANSWERS_BYTES_MAX

from benchmarks.floods import MEBIBYTE, resident_bytes
from ferrorpc.errors import ErrorCode, LimitExceededError
from ferrorpc.v1 import error_pb2, rendezvous_pb2, session_pb2, store_pb2
from ferrorpc.wire.identity import Identity, Role
from ferrorpc.wire.status import TRAILER
from tests.unit.ferrorpc_coordinator.test_driver import turns


class AbortedError(Exception):
    """The exception of `abort`."""


class Call:
    """A call with given frames. After them, `read` blocks if `silent`, else it returns the end of the stream."""

    def __init__(self, *frames, silent=False, proven=None):
        self._frames = list(frames)
        self._silent = silent
        self._proven = proven or {}
        self.written = []
        self.error = None

    async def read(self):
        if not self._frames and self._silent:
            await asyncio.Event().wait()
        return self._frames.pop(0).SerializeToString() if self._frames else grpc.aio.EOF

    async def write(self, data):
        self.written.append(session_pb2.ServerFrame.FromString(data))

    def time_remaining(self):
        return 1.0

    def peer(self):
        return "ipv4:192.0.2.1:5"

    def auth_context(self):
        return self._proven

    async def abort(self, code, details, trailers):
        self.error = error_pb2.ErrorDetail.FromString(dict(trailers)[TRAILER])
        raise AbortedError(details)


class RememberingDriver:
    """A driver that records its callers."""

    def __init__(self):
        self.callers = []

    def connect(self, hello, caller):
        self.callers.append(caller)
        return SendQueue(1)

    def receive(self, stream, frame):
        pass

    def disconnect(self, stream):
        pass

    async def call(self, request, caller, hold):
        self.callers.append(caller)
        return store_pb2.StoreResponse()


def served(call, *, unary=False):
    """The driver after one session, or after one unary store request."""
    driver = RememberingDriver()
    servicer = CoordinatorServicer(driver, Counters())

    async def serve():
        if unary:
            await servicer._unary("Store", session_pb2.UnaryStoreRequest)(None, call)
        else:
            await servicer._session(None, call)

    try:
        asyncio.run(asyncio.wait_for(serve(), 20))
    except AbortedError:
        assert call.error is not None
    return driver


def test_answers_are_counted_by_job_until_their_calls_end():
    ends = []

    class Answered(Call):
        def add_done_callback(self, callback):
            ends.append(callback)

    hold, call = partial(CoordinatorServicer(RememberingDriver(), Counters())._hold, is_refusable=True), Answered()
    hold(call, "a", ANSWERS_BYTES_MAX)
    with pytest.raises(LimitExceededError, match="'a' leave unread"):
        hold(call, "a", SMALL_ANSWER_BYTES + 1)
    hold(call, "a", SMALL_ANSWER_BYTES)
    hold(call, "b", ANSWERS_BYTES_MAX)
    ends[0](call)
    hold(call, "a", ANSWERS_BYTES_MAX)
    hold(call, "a", ANSWERS_BYTES_MAX, is_refusable=False)  # of what was done


HELLO = session_pb2.ClientFrame(hello=session_pb2.Hello(job="a"))
REQUEST = session_pb2.UnaryStoreRequest(request=store_pb2.StoreRequest(get={"key": "k"}))


@pytest.mark.parametrize(
    ("proven", "identities"),
    [
        ({}, None),
        ({"x509_pem_cert": [b"..."]}, frozenset()),
        ({"x509_pem_cert": [b"..."], "peer_uri": [b"ferrorpc://a/worker"]}, frozenset({Identity("a", Role.WORKER)})),
    ],
    ids=["none", "of nobody", "worker"],
)
def test_a_certificate_without_identities_is_not_taken_for_none(proven, identities):
    """Without a certificate a token is enough; with a foreign one nothing is."""
    for driver in (served(Call(HELLO, proven=proven)), served(Call(REQUEST, proven=proven), unary=True)):
        assert [caller.identities for caller in driver.callers] == [identities]


@pytest.mark.parametrize(("unary", "what"), [(False, "Hello"), (True, "UnaryStoreRequest")])
def test_a_call_without_its_first_message_is_ended(monkeypatch, unary, what):
    monkeypatch.setattr(first_message, "FIRST_MESSAGE_SECONDS", 0.02)
    call = Call(silent=True)
    assert not served(call, unary=unary).callers
    assert f"sent no complete {what}" in call.error.message
    assert call.error.code == ErrorCode.COORDINATOR_UNAVAILABLE  # a member that stood still, and dials again


@pytest.mark.parametrize(("unary", "what"), [(False, "Hello"), (True, "UnaryStoreRequest")])
def test_a_call_that_ends_before_its_first_message_is_refused(unary, what):
    call = Call()
    assert not served(call, unary=unary).callers
    assert f"ended before its {what}" in call.error.message


JOIN = session_pb2.ClientFrame(sequence=1, join=rendezvous_pb2.JoinRequest(pinned_rank=3))
UNKNOWN = b"\xc2\x3e" + b"\x80\x80\x40" + bytes(MEBIBYTE)
"""A field with number 1000 of a later version."""
REPLACED = session_pb2.ClientFrame(store={"set": {"key": "k", "value": bytes(MEBIBYTE)}})


@pytest.mark.parametrize("more", [UNKNOWN, REPLACED.SerializeToString()], ids=["unknown", "replaced"])
def test_what_is_kept_of_a_request_keeps_no_memory_of_what_nobody_reads(more):
    """A join is kept until its round closes."""
    before = resident_bytes(os.getpid())
    joins = [compact(session_pb2.ClientFrame, more + JOIN.SerializeToString(), "").join for _ in range(64)]
    assert joins == [JOIN.join] * 64
    assert resident_bytes(os.getpid()) - before < 32 * MEBIBYTE


def test_a_session_that_says_nothing_more_keeps_no_memory_of_its_last_frame():
    data = UNKNOWN + JOIN.SerializeToString()

    class Reading(Call):
        async def read(self):
            if self._frames == [None]:
                await asyncio.sleep(60)
            frame = self._frames.pop(0)
            return frame if isinstance(frame, bytes) else frame.SerializeToString()

    async def references():
        call = Reading(HELLO, data, data, None)
        session = asyncio.ensure_future(CoordinatorServicer(RememberingDriver(), Counters())._session(None, call))
        while call._frames != [None]:
            await asyncio.sleep(0.01)
        kept = sys.getrefcount(data)
        session.cancel()
        return kept

    alone = sys.getrefcount(data)
    assert asyncio.run(references()) == alone


@pytest.mark.parametrize(("name", "sent"), [("Session", HELLO), ("Store", REQUEST)])
@pytest.mark.parametrize("code", ["OK", "INVALID_ARGUMENT"])
def test_calls_are_counted_by_method_and_code(name, sent, code):
    counters = Counters()
    servicer = CoordinatorServicer(RememberingDriver(), counters)
    handle = servicer._session if name == "Session" else servicer._unary(name, session_pb2.UnaryStoreRequest)
    with contextlib.suppress(AbortedError):
        asyncio.run(handle(None, Call(*([sent] if code == "OK" else []))))
    assert counters.handled == {(name, code): 1}


class WaitingDriver(RememberingDriver):
    """A driver that answers no call, and whose sessions have something to write at once."""

    def connect(self, hello, caller):
        queue = super().connect(hello, caller)
        queue.push(b"")
        return queue

    async def call(self, request, caller, hold):
        await asyncio.Event().wait()


class Gone(Call):
    """A client that has gone when it is written to."""

    def __init__(self, failure):
        super().__init__(HELLO, silent=True)
        self.failure = failure

    async def write(self, data):
        raise self.failure


@pytest.mark.parametrize(
    "call",
    [
        Call(HELLO, silent=True),
        Gone(grpc.aio.InternalError("Failed: execute_batch")),
        Gone(grpc.aio.UsageError("RPC already finished.")),
        Call(REQUEST),
    ],
    ids=["cut", "gone", "finished", "unary"],
)
def test_calls_that_their_clients_cut_off_are_counted_too(call):
    """Most sessions end in this way."""

    async def end():
        counters = Counters()
        servicer = CoordinatorServicer(WaitingDriver(), counters)
        unary = call._frames == [REQUEST]
        handle = servicer._unary("Store", session_pb2.UnaryStoreRequest) if unary else servicer._session
        handling = asyncio.ensure_future(handle(None, call))
        await turns()
        handling.cancel()
        await asyncio.wait([handling])
        return counters.handled

    assert [(code, count) for (_, code), count in asyncio.run(end()).items()] == [("CANCELLED", 1)]


class FaultyDriver(RememberingDriver):
    """A driver with a bug, which no client has to do with."""

    def connect(self, hello, caller):
        raise asyncio.InvalidStateError

    async def call(self, request, caller, hold):
        raise asyncio.InvalidStateError


@pytest.mark.parametrize("sent", [HELLO, REQUEST], ids=["session", "unary"])
def test_a_bug_is_not_taken_for_a_client_that_went(sent):
    counters = Counters()
    servicer = CoordinatorServicer(FaultyDriver(), counters)
    handle = servicer._session if sent is HELLO else servicer._unary("Store", session_pb2.UnaryStoreRequest)
    with pytest.raises(asyncio.InvalidStateError):
        asyncio.run(handle(None, Call(sent)))
    assert [(code, count) for (_, code), count in counters.handled.items()] == [("UNKNOWN", 1)]
