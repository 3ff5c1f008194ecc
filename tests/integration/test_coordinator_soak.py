"""Many hundreds of abandoned calls and dropped streams leave the coordinator as large as it was."""

from pathlib import Path

import grpc
import pytest

from ferrorpc.v1 import barrier_pb2, session_pb2, session_pb2_grpc, store_pb2
from tests.integration.coordinator_process import Client, channel_to, coordinator
from tests.waiting import eventually

GROWTH_KIB_MAX = 3 << 10

pytestmark = pytest.mark.slow


def resident_kib(process):
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def growth(process, act, warm=200, count=750):
    """KiB by which the coordinator grew over `count` acts, after some that fill pools and caches."""
    for number in range(warm):
        act(number)
    before = resident_kib(process)
    for number in range(warm, warm + count):
        act(number)
    return resident_kib(process) - before


def test_cancelled_calls_are_forgotten():
    with coordinator() as process, channel_to(process.address) as channel:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)

        def abandon(number):
            request = barrier_pb2.BarrierRequest(name="b", ordinal=1, count=1 << 20, timeout_ms=60_000)
            message = session_pb2.UnaryBarrierRequest(job="job", client_id=f"tool-{number}", request=request)
            call = stub.Barrier.future(message, timeout=60)
            if number % 32 == 0:  # some have arrived when they go, others not yet
                status()
            call.cancel()

        def status():
            return stub.Status(session_pb2.StatusRequest(job="job"), timeout=10)

        # A first call makes the job.
        read = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k"))
        stub.Store(session_pb2.UnaryStoreRequest(job="job", client_id="tool", request=read), timeout=10)
        assert growth(process, abandon) < GROWTH_KIB_MAX
        eventually(lambda: not any(b.arrived_ranks for b in status().barriers))


def test_dropped_and_resumed_streams_are_forgotten():
    with coordinator() as process:
        channel = channel_to(process.address)
        client = Client(process.address, "m", channel=channel).greeted()
        token = client.welcome.resume_token

        def blink(number):
            nonlocal client, token
            client.drop()
            client = Client(process.address, "m", instance=client.instance, resume=token, channel=channel).greeted()
            assert client.welcome.resumed
            token = client.welcome.resume_token

        assert growth(process, blink) < GROWTH_KIB_MAX
        client.drop()
        channel.close()


def test_requests_of_one_long_session_are_forgotten():
    with coordinator() as process, Client(process.address, "m") as member:

        def write(number):
            member.store(set=store_pb2.SetOperation(key=f"k{number % 10}", value=b"x" * 100))
            member.results.clear()

        assert growth(process, write, count=2_000) < GROWTH_KIB_MAX


def test_a_port_scan_leaves_nothing():
    with coordinator() as process:

        def knock(number):
            with channel_to(process.address) as channel, pytest.raises(grpc.RpcError):
                channel.unary_unary("/other.Service/Method")(b"x", timeout=5)

        assert growth(process, knock, warm=50, count=200) < GROWTH_KIB_MAX
