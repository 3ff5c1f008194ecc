"""gRPC's defaults that do harm to a training job, each with the option that mends it (wire/options.py).

Stopped peers, proxies and interpreter exits are in test_grpc_processes.py, limits of single streams in test_grpc_lane.py.
"""

import asyncio
import gzip
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from ferrorpc.errors import ErrorCode
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.transports.grpc.server import METHOD
from ferrorpc.transports.grpc.threads import ThreadPerCall
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire import options
from tests.integration.lane_processes import PeerHandle, peers

SECONDS = 30.0


class Echo(grpc.GenericRpcHandler):
    """Streams give back what they get; unary calls too, after a moment."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method.endswith("Stream"):
            return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
        return grpc.unary_unary_rpc_method_handler(self.unary)

    async def unary(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.sleep(0.05)
        return request


@pytest.mark.parametrize("end", [options.data_server, options.control_server], ids=lambda end: end.__name__)
def test_two_servers_cannot_share_a_port(end: Callable[[], options.Options]) -> None:
    first = grpc.server(ThreadPerCall(SYSTEM_CLOCK, "first"), options=end())
    second = grpc.server(ThreadPerCall(SYSTEM_CLOCK, "second"), options=end())
    port = first.add_insecure_port("127.0.0.1:0")
    first.start()
    try:
        with pytest.raises(RuntimeError, match="Failed to bind"):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        first.stop(None).wait(SECONDS)
        second.stop(None).wait(SECONDS)


def test_channels_of_one_process_do_not_share_a_connection_and_its_limit_of_streams() -> None:
    server = grpc.server(ThreadPerCall(SYSTEM_CLOCK, "echo"), handlers=[Echo()], options=options.control_server())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"hello"
        hold.wait(SECONDS)

    channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=options.session_channel()) for _ in range(100)]
    try:
        calls = [channel.stream_stream("/echo/Stream")(requests(), timeout=SECONDS) for channel in channels]
        assert [next(call) for call in calls] == [b"hello"] * 100
    finally:
        hold.set()
        for channel in channels:
            channel.close()
        server.stop(None).wait(SECONDS)


def test_two_thousand_calls_at_once_are_all_answered() -> None:
    async def burst() -> list[bytes]:
        server = grpc.aio.server(handlers=[Echo()], options=options.control_server())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options.session_channel()) for _ in range(50)]
        calls = [channels[number % 50].unary_unary("/echo/Unary")(b"%d" % number, timeout=SECONDS) for number in range(2000)]
        answers = await asyncio.gather(*calls)
        for channel in channels:
            await channel.close()
        await server.stop(None)
        return answers

    assert asyncio.run(burst()) == [b"%d" % number for number in range(2000)]


@pytest.mark.parametrize("end", [options.data_server, options.control_server], ids=lambda end: end.__name__)
def test_what_is_packed_is_not_unpacked(end: Callable[[], options.Options]) -> None:
    server = grpc.server(ThreadPerCall(SYSTEM_CLOCK, "echo"), handlers=[Echo()], options=end())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    zipping = grpc.insecure_channel(f"127.0.0.1:{port}", options=options.data_channel(), compression=grpc.Compression.Gzip)
    try:
        with zipping as channel:
            (taken,) = channel.stream_stream("/echo/Stream")(iter([bytes(64 << 20)]), timeout=SECONDS)
    finally:
        server.stop(None).wait(SECONDS)
    assert gzip.decompress(taken) == bytes(64 << 20)


def peak_bytes(process_id: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_message_that_unpacks_to_more_than_the_limit_takes_no_memory() -> None:
    bomb = bytes(128 << 20)
    peer = PeerHandle(0)
    with peers(peer):
        before = peak_bytes(peer.process.pid)
        zipping = grpc.insecure_channel(peer.address, options=options.data_channel(), compression=grpc.Compression.Gzip)
        with zipping as channel:
            (answer,) = channel.stream_stream(METHOD)(iter([bomb]), timeout=SECONDS)
        grown = peak_bytes(peer.process.pid) - before
    assert transport_pb2.ControlMessage.FromString(answer).refused.code == ErrorCode.CODEC
    assert grown < 64 << 20
