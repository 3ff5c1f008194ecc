"""The gRPC lane against a plain generated-protobuf stream over the same grpcio, in the same run, between two processes.

    python -m benchmarks.lane [--sizes 64KiB 1MiB 16MiB 64MiB] [--mib 128] [--rounds 5]

Both carry NumPy arrays in and out: the sender starts from an array, the receiver ends with one, whole and contiguous. Rates
are of payload bytes from the first send to the answer that all have arrived; times are of one small message and its answer.
Rounds of the two alternate; medians are shown, with the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ferrorpc.config import size_bytes

# ferrorpc comes first: it sets what gRPC reads when it is imported.
# isort: split
import grpc
import numpy as np

from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc import GrpcTransport
from ferrorpc.transports.grpc_server import WorkerServer
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import Assignment, DType, Peer
from ferrorpc.v1 import transport_pb2, transport_pb2_grpc
from ferrorpc.wire.frames import Header, Key

SECONDS = 120.0
KEY = Key(0, 0, 1)
SMALL_BYTES = 64
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]


class Sender(Protocol):
    """One way to bring arrays to the other process."""

    def send(self, array: np.ndarray, *, answer: bool) -> None:
        """Sends one array; with `answer`, returns once the other process has it and all before it."""


class LaneRank:
    """One rank with a transport to the other; messages are assembled on the thread that waits for them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.peer = 1 - rank
        self.server = WorkerServer("127.0.0.1", "127.0.0.1", SYSTEM_CLOCK)

    def meet(self, addresses: list[str]) -> None:
        peers = tuple(Peer(number, f"m{number}", address=address) for number, address in enumerate(addresses))
        mailbox = Mailbox(self.rank, lambda error: sys.exit(str(error)))
        assignment = Assignment("bench", "c", 1, self.rank, peers)
        self.transport = GrpcTransport(self.server, assignment, mailbox, Latch(), SYSTEM_CLOCK, _lost)
        self._arrived = threading.Semaphore(0)
        self._box = mailbox.enter(KEY, "bench()", self._arrived.release)
        self._room = threading.Semaphore(0)

    def send(self, array: np.ndarray, *, answer: bool) -> None:
        header = Header(int(answer), "bench()", DType.UINT8, array.shape, array.size)
        for offset in range(0, array.size, CHUNK_BYTES):
            chunk = array[offset : offset + CHUNK_BYTES]
            while not self.transport.send(self.peer, KEY, header, offset, chunk, self._room.release):
                self._room.acquire(timeout=SECONDS)
        if answer:
            self.receive()

    def receive(self) -> tuple[np.ndarray, bool]:
        """The next message, and whether its sender waits for an answer."""
        array, received = np.empty(0, np.uint8), 0
        while True:
            for (_, slot), frames in list(self._box.frames.items()):
                while frames:
                    frame = frames.popleft()
                    if frame.offset == 0:
                        array = np.empty(frame.header.total, np.uint8)
                    array[frame.offset : frame.offset + len(frame.payload)] = np.frombuffer(frame.payload, np.uint8)
                    received += len(frame.payload)
                    if received == array.size:
                        return array, bool(slot)
            self._arrived.acquire(timeout=SECONDS)


def _lost(peer: int, reason: str) -> None:
    sys.stderr.write(f"the other process was lost: {reason}\n")


class PlainServicer(transport_pb2_grpc.WorkerServiceServicer):
    """Takes generated messages one by one; answers those that ask for it."""

    def Stream(self, requests: Iterator[transport_pb2.DataMessage], context: Any) -> Iterator[transport_pb2.ControlMessage]:
        for message in requests:
            array = np.frombuffer(message.frame.payload, np.uint8)
            if message.frame.slot and array.size == message.frame.total:
                yield transport_pb2.ControlMessage(opened=transport_pb2.Opened(generation=1))


class PlainSender:
    """The obvious way: an array's bytes in a generated message, on a stream."""

    def __init__(self, address: str) -> None:
        self._queue: queue.Queue[transport_pb2.DataMessage] = queue.Queue(maxsize=2)
        self._channel = grpc.insecure_channel(address, options=UNLIMITED)
        stub = transport_pb2_grpc.WorkerServiceStub(self._channel)
        self._answers: Any = stub.Stream(iter(self._queue.get, None))

    def send(self, array: np.ndarray, *, answer: bool) -> None:
        message = transport_pb2.DataMessage()
        frame = message.frame
        frame.group, frame.stream, frame.number = KEY
        frame.slot, frame.total, frame.signature, frame.dtype = int(answer), array.size, "bench()", int(DType.UINT8)  # type: ignore[assignment]
        frame.shape.append(array.size)
        frame.payload = array.tobytes()
        self._queue.put(message)
        if answer:
            next(self._answers)

    def close(self) -> None:
        self._channel.close()


def serve() -> None:
    """The other process: both receivers at once, until stdin closes."""
    plain = grpc.server(ThreadPoolExecutor(2), options=UNLIMITED)
    transport_pb2_grpc.add_WorkerServiceServicer_to_server(PlainServicer(), plain)
    port = plain.add_insecure_port("127.0.0.1:0")
    plain.start()
    lane = LaneRank(1)
    print(f"127.0.0.1:{port} {lane.server.address}", flush=True)
    lane.meet([sys.stdin.readline().strip(), lane.server.address])

    def answer() -> None:
        while True:
            _, asked = lane.receive()
            if asked:
                lane.send(np.zeros(1, np.uint8), answer=False)

    threading.Thread(target=answer, daemon=True).start()
    sys.stdin.read()
    lane.transport.close(1.0)
    os._exit(0)  # the standard pool of the plain server would wait for its stream


def rate(sender: Sender, size: int, total_bytes: int) -> float:
    """Bytes per second of arrays of this size, one after the other."""
    array = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    count = max(1, total_bytes // size)
    began = time.perf_counter()
    for number in range(count):
        sender.send(array, answer=number == count - 1)
    return count * size / (time.perf_counter() - began)


def round_trip(sender: Sender, count: int = 300) -> float:
    """Seconds from a small message to its answer, the median of many."""
    array = np.zeros(SMALL_BYTES, np.uint8)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        sender.send(array, answer=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(senders: dict[str, Sender], sizes: list[int], total_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """One row per size and one for the round trip; senders take turns within every round."""
    rows: list[dict[str, Any]] = []
    times = {name: [round_trip(sender) for _ in range(rounds)] for name, sender in senders.items()}
    rows.append({"what": "round trip (us)"} | {name: statistics.median(seen) * 1e6 for name, seen in times.items()})
    for size in sizes:
        seen: dict[str, list[float]] = {name: [] for name in senders}
        for _ in range(rounds):
            for name, sender in senders.items():
                seen[name].append(rate(sender, size, total_bytes))
        rows.append({"what": f"{size} B (GB/s)"} | {name: statistics.median(values) / 1e9 for name, values in seen.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The gRPC lane against a plain protobuf stream.")
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "1MiB", "16MiB", "64MiB"])
    parser.add_argument("--mib", type=int, default=128, help="MiB per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    other = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lane", "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    plain_address, lane_address = other.stdout.readline().split()
    lane = LaneRank(0)
    other.stdin.write(lane.server.address + "\n")
    other.stdin.flush()
    lane.meet([lane.server.address, lane_address])
    plain = PlainSender(plain_address)
    senders: dict[str, Sender] = {"lane": lane, "plain": plain}
    for sender in senders.values():
        rate(sender, 1 << 20, 16 << 20)
    rows = measure(senders, [size_bytes(size) for size in arguments.sizes], arguments.mib << 20, arguments.rounds)
    plain.close()
    other.stdin.close()
    other.wait()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, grpcio {grpc.__version__}")
    print(f"{'':>20} {'lane':>9} {'plain':>9} {'lane/plain':>11}")
    for row in rows:
        print(f"{row['what']:>20} {row['lane']:9.2f} {row['plain']:9.2f} {row['lane'] / row['plain']:11.2f}")


if __name__ == "__main__":
    main()
