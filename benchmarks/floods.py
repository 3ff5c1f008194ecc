"""Floods a coordinator with bad requests while a job runs; measures the job's speed and the coordinator's memory.

    python -m benchmarks.floods [--ranks 64] [--connections 2000] [--seconds 6]

Every flood is bounded in time and count. During a flood all ranks enter named barriers, one after the other. For each flood it
shows barriers per second, lost ranks, and by how much the coordinator has grown since before the first flood.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import ferrorpc  # noqa: F401 (first: it sets environment variables that gRPC reads when it is imported)
from benchmarks.options import amount, count

# isort: split
import grpc
from grpc_health.v1 import health_pb2

from ferrorpc.wire import options
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.crowd import Crowd

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PINGS = 0, 1, 3, 4, 6
END_HEADERS: Final = 4
CANCEL: Final = struct.pack(">I", 8)
BATCH: Final = 50
WINDOW: Final = 12
HEALTH: Final = "/grpc.health.v1.Health"
BARRIER_SECONDS: Final = 60.0
MEBIBYTE: Final = 1 << 20

Flood = Callable[[tuple[str, int], float, int], int]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a gRPC call, without header compression."""
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers"))
    fields += ((b"content-type", b"application/grpc"), *more)
    return b"".join(bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in fields)


SESSION: Final = headers(b"/ferrorpc.v1.CoordinatorService/Session")
ZIPPED: Final = headers(b"/ferrorpc.v1.CoordinatorService/Status", (b"grpc-encoding", b"gzip"))


def silent(target: tuple[str, int], seconds: float, count: int) -> int:
    """Connections of which half send nothing, and half only the preface of HTTP/2."""
    with contextlib.ExitStack() as held:
        opened = 0
        for number in range(count):
            with contextlib.suppress(OSError):
                connection = held.enter_context(socket.create_connection(target, 2.0))
                opened += 1
                if number % 2:
                    connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        threading.Event().wait(seconds)
    return opened


def repeated(target: tuple[str, int], seconds: float, batch: Callable[[int], bytes]) -> int:
    """Sends batches until the time is over, on a new connection whenever one ends. Returns how many were sent."""
    until, sent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(target, 2.0) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
            reader = threading.Thread(target=_drain, args=(connection,), daemon=True)
            reader.start()
            number = 0
            while time.monotonic() < until and reader.is_alive():
                connection.sendall(batch(number))
                number, sent = number + 1, sent + 1
    return sent


def _drain(connection: socket.socket) -> None:
    """Reads and discards data until the other side closes the connection."""
    with contextlib.suppress(OSError):
        while True:
            try:
                if not connection.recv(1 << 16):
                    return
            except TimeoutError:
                continue


def rapid_reset(target: tuple[str, int], seconds: float, _count: int) -> int:
    """Streams that are opened and immediately reset."""

    def batch(number: int) -> bytes:
        streams = range(2 * BATCH * number + 1, 2 * BATCH * (number + 1), 2)
        return b"".join(frame(HEADERS, END_HEADERS, one, SESSION) + frame(RESET, 0, one, CANCEL) for one in streams)

    return BATCH * repeated(target, seconds, batch)


def pings(target: tuple[str, int], seconds: float, _count: int) -> int:
    """HTTP/2 pings."""
    return BATCH * repeated(target, seconds, lambda _: BATCH * frame(PINGS, 0, 0, bytes(8)))


def calls(first: bytes, message: bytes) -> Callable[[int], bytes]:
    """Makes batches of one call each, with as much of the message as the flow control window allows."""

    def batch(number: int) -> bytes:
        stream = 2 * number + 1
        parts = [message[at : at + 16384] for at in range(0, min(len(message), 65535), 16384)]
        return frame(HEADERS, END_HEADERS, stream, first) + b"".join(frame(DATA, 0, stream, part) for part in parts)

    return batch


def oversized(target: tuple[str, int], seconds: float, _count: int) -> int:
    """Messages that announce a length of 2 GiB."""
    return repeated(target, seconds, calls(SESSION, b"\0" + struct.pack(">I", (1 << 31) - 1) + bytes(16384)))


def gzip_bombs(target: tuple[str, int], seconds: float, _count: int) -> int:
    """Messages of 60 KiB that decompress to 60 MiB."""
    bomb = gzip.compress(bytes(60 * MEBIBYTE))
    return repeated(target, seconds, calls(ZIPPED, b"\1" + struct.pack(">I", len(bomb)) + bomb))


def health(target: tuple[str, int], seconds: float, _count: int) -> int:
    """Questions about a service with a name of 1 MiB, and watches of it, which stay open."""
    request = health_pb2.HealthCheckRequest(service="\1" * MEBIBYTE).SerializeToString()
    until, sent = time.monotonic() + seconds, 0
    with grpc.insecure_channel(f"{target[0]}:{target[1]}", options=options.session_channel()) as channel:
        check, watch = channel.unary_unary(f"{HEALTH}/Check"), channel.unary_stream(f"{HEALTH}/Watch")
        watches = []
        while time.monotonic() < until:
            asked = [check.future(request, timeout=BARRIER_SECONDS) for _ in range(WINDOW)]
            if len(watches) < BATCH:
                watches.append(watch(request))
                with contextlib.suppress(grpc.RpcError):  # a server that other floods keep busy refuses some calls
                    next(watches[-1])
            sent += sum(call.exception() is not None for call in asked)
        for call in watches:
            call.cancel()
    return sent + len(watches)


FLOODS: Final[dict[str, Flood]] = {
    "silent": silent,
    "rapid_reset": rapid_reset,
    "pings": pings,
    "oversized": oversized,
    "gzip_bombs": gzip_bombs,
    "health": health,
}


def resident_bytes(process: int) -> int:
    """The resident memory of a process."""
    return _memory_bytes(process, "VmRSS:")


def peak_bytes(process: int) -> int:
    """The most resident memory that a process has had so far."""
    return _memory_bytes(process, "VmHWM:")


def _memory_bytes(process: int, row: str) -> int:
    words = Path(f"/proc/{process}/status").read_text().split()
    return int(words[words.index(row) + 1]) << 10


class Job:
    """Ranks that enter named barriers, one after the other."""

    def __init__(self, address: str, ranks: int) -> None:
        self.crowd = Crowd(address, ranks, "flooded")
        self.barriers = 0

    def meet(self) -> None:
        """One barrier of all ranks."""
        before = [rank.released for rank in self.crowd.ranks]
        self.crowd.barrier(f"b{self.barriers}", list(range(self.crowd.size)))
        until = time.monotonic() + BARRIER_SECONDS
        while any(rank.released == was for rank, was in zip(self.crowd.ranks, before, strict=True)):
            if time.monotonic() > until:
                raise TimeoutError(f"barrier {self.barriers} is not over after {BARRIER_SECONDS:g} s")
            threading.Event().wait(0.002)
        self.barriers += 1

    def rate(self, busy: Callable[[], bool]) -> float:
        """Runs barriers while `busy()` is true, at least one. Returns barriers per second."""
        began, before = time.monotonic(), self.barriers
        self.meet()
        while busy():
            self.meet()
        return (self.barriers - before) / (time.monotonic() - began)

    @property
    def evicted(self) -> int:
        """How many ranks are no longer in their first generation."""
        return sum(rank.generation != 1 or rank.call.done() for rank in self.crowd.ranks)


def under(job: Job, flood: Flood, target: tuple[str, int], seconds: float, count: int) -> tuple[int, float]:
    """Runs one flood while the job runs. Returns how much was sent, and barriers per second."""
    sent: list[int] = []
    attacker = threading.Thread(target=lambda: sent.append(flood(target, seconds, count)), daemon=True)
    attacker.start()
    rate = job.rate(attacker.is_alive)
    attacker.join(BARRIER_SECONDS)
    return sum(sent), rate


def main() -> None:
    """Runs every flood, and prints a line for each."""
    parser = argparse.ArgumentParser(description="Floods against a coordinator while a job works.")
    parser.add_argument("--ranks", type=count, default=64)
    parser.add_argument("--connections", type=count, default=2000)
    parser.add_argument("--seconds", type=amount, default=6.0)
    arguments = parser.parse_args()
    coordinator = CoordinatorProcess()
    job = Job(coordinator.address, arguments.ranks)
    host, port = coordinator.address.split(":")
    try:
        until = time.monotonic() + arguments.seconds / 2
        print(f"idle: {job.rate(lambda: time.monotonic() < until):.1f} barriers/s of {arguments.ranks} ranks", flush=True)
        began_bytes = resident_bytes(coordinator.process.pid)
        for name, flood in FLOODS.items():
            sent, rate = under(job, flood, (host, int(port)), arguments.seconds, arguments.connections)
            now, peak = ((of(coordinator.process.pid) - began_bytes) / MEBIBYTE for of in (resident_bytes, peak_bytes))
            grown = f"{now:+.0f} MiB, {peak:+.0f} at its peak so far"
            print(f"{name:12} {sent:8} sent  {rate:6.1f} barriers/s  {job.evicted} lost  {grown}", flush=True)
    finally:
        job.crowd.close()
        coordinator.kill()


if __name__ == "__main__":
    main()
