"""Measures the cost of mutual TLS over gRPC: small messages and bandwidth with and without it, in one run of two processes.

    python -m benchmarks.tls [--sizes 1MiB 16MiB] [--mib 128] [--rounds 15]

The two take turns. It shows medians, and by how much TLS is slower than the turn without it in the same round. A small message
is one of 64 bytes, with an answer.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import array_bytes, count
from ferrorpc.cli.authority import Authority
from ferrorpc.errors import FerroError
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import Assignment, DType, Peer
from ferrorpc.wire.frames import Header, Key
from ferrorpc.wire.identity import Identity, Role
from ferrorpc.wire.tls import TlsFiles

SECONDS = 120.0
KEY = Key(0, 0, 1)
SMALL_BYTES = 64
SMALL = Header(0, "bench()", DType.UINT8, (SMALL_BYTES,), SMALL_BYTES)
NOTHING = np.zeros(SMALL_BYTES, np.uint8)


class LaneRank:
    """One rank with a transport to the other. Messages are assembled on the thread that waits for them."""

    def __init__(self, rank: int, tls: TlsFiles | None = None) -> None:
        self.rank = rank
        self.peer = 1 - rank
        self.operations = itertools.count(KEY.number + 1)
        """The numbers of the small messages, equal on both sides."""
        self.server = WorkerServer("127.0.0.1", "127.0.0.1", tls=tls)

    def meet(self, addresses: list[str]) -> None:
        peers = tuple(Peer(number, f"m{number}", address=address) for number, address in enumerate(addresses))
        mailbox = self._mailbox = Mailbox(self.rank, _failed)
        assignment = Assignment("bench", "c", 1, self.rank, peers)
        self.transport = GrpcTransport(self.server, assignment, mailbox, Latch(), SYSTEM_CLOCK, _lost)
        self._numbers = itertools.count()
        self._arrived = threading.Semaphore(0)
        self._box = mailbox.enter(KEY, "bench()", self._arrived.release)
        self._room = threading.Semaphore(0)

    def send(self, array: np.ndarray, *, answer: bool) -> None:
        slot = 2 * next(self._numbers) + answer  # a slot of its own for each message
        header = Header(slot, "bench()", DType.UINT8, array.shape, array.size)
        for offset in range(0, array.size, CHUNK_BYTES):
            chunk = array[offset : offset + CHUNK_BYTES]
            while not self.transport.send(self.peer, KEY, header, offset, chunk, self._room.release):
                self._room.acquire(timeout=SECONDS)
        if answer:
            self.receive(SECONDS)

    def exchange(self, number: int, seconds: float | None, *, first: bool) -> None:
        """Sends a small message and receives one (the other way round unless `first`), as an operation of its own."""
        key, arrived = Key(0, 0, number), threading.Semaphore(0)
        box = self._mailbox.enter(key, "bench()", arrived.release)
        if first:
            self.transport.send(self.peer, key, SMALL, 0, NOTHING, _nothing)
        while not box.arrivals:
            _wait(arrived, seconds)
        self._mailbox.leave(key)
        if not first:
            self.transport.send(self.peer, key, SMALL, 0, NOTHING, _nothing)

    def receive(self, seconds: float | None) -> tuple[np.ndarray, bool]:
        """Receives the next message. Returns it, and whether its sender waits for an answer. `seconds` limits each wait."""
        array, received = np.empty(0, np.uint8), 0
        while True:
            while self._box.arrivals:
                place = self._box.arrivals.popleft()
                frame = self._box.frames[place].popleft()
                if frame.offset == 0:
                    array = np.empty(frame.header.total, np.uint8)
                array[frame.offset : frame.offset + len(frame.payload)] = np.frombuffer(frame.payload, np.uint8)
                received += len(frame.payload)
                if received == array.size:
                    del self._box.frames[place]
                    return array, bool(place[1] % 2)
            _wait(self._arrived, seconds)


def _wait(arrived: threading.Semaphore, seconds: float | None) -> None:
    if not arrived.acquire(timeout=seconds):
        raise TimeoutError(f"the other process sent nothing for {seconds:g} s")


def _nothing() -> None:
    """Called when the transport has room; there always is for a small message, because the one before was answered."""


def _failed(error: FerroError) -> None:
    sys.stderr.write(f"{error}\n")
    os._exit(1)


def _lost(peer: int, reason: str) -> None:
    sys.stderr.write(f"the other process was lost: {reason}\n")


def rate(sender: LaneRank, size: int, total_bytes: int) -> float:
    """Bytes per second when arrays of this size are sent one after the other."""
    array = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    count = max(1, total_bytes // size)
    began = time.perf_counter()
    for number in range(count):
        sender.send(array, answer=number == count - 1)
    return count * size / (time.perf_counter() - began)


def small_rate(sender: LaneRank, count: int = 300) -> float:
    """Small messages per second, each with an answer, from the median of many."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        sender.exchange(next(sender.operations), SECONDS, first=True)
        times.append(time.perf_counter() - began)
    return 1 / statistics.median(times)


def measure(senders: dict[str, LaneRank], sizes: list[int], total_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for the small messages and one for each size. Senders take turns in every round."""
    rows: list[dict[str, Any]] = []
    kinds: dict[str, tuple[float, Callable[[LaneRank], float]]] = {"small messages (1/s)": (1.0, small_rate)}
    for size in sizes:
        kinds[f"{size} B (GB/s)"] = (1e-9, partial(rate, size=size, total_bytes=total_bytes))
    for what, (unit, one_rate) in kinds.items():
        seen: dict[str, list[float]] = {name: [] for name in senders}
        for _ in range(rounds):
            for name, sender in senders.items():
                seen[name].append(one_rate(sender) * unit)
        row: dict[str, Any] = {name: statistics.median(values) for name, values in seen.items()}
        kept = [tls / plain for plain, tls in zip(seen["plain"], seen["tls"], strict=True)]
        rows.append({"what": what, "cost": 1 - statistics.median(kept)} | row)
    return rows


def files(directory: str) -> TlsFiles:
    """The worker's certificate files."""
    return TlsFiles(*(f"{directory}/{name}" for name in ("ca.pem", "worker.pem", "worker.key")))


def answer(rank: LaneRank) -> None:
    """Answers every message that asks for it, for ever."""
    while True:
        _, asked = rank.receive(None)
        if asked:
            rank.send(np.zeros(1, np.uint8), answer=False)


def exchange(rank: LaneRank) -> None:
    """Answers every small message, for ever."""
    while True:
        rank.exchange(next(rank.operations), None, first=False)


def serve(directory: str) -> None:
    """Runs the other process, until stdin closes."""
    ranks = [LaneRank(1), LaneRank(1, files(directory))]
    print(*(rank.server.address for rank in ranks), flush=True)
    for rank, address in zip(ranks, sys.stdin.readline().split(), strict=True):
        rank.meet([address, rank.server.address])
        for task in (answer, exchange):
            threading.Thread(target=task, args=(rank,), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="The cost of mutual TLS on the gRPC lane.")
    parser.add_argument("--sizes", type=array_bytes, nargs="+", default=[1 << 20, 16 << 20])
    parser.add_argument("--mib", type=count, default=128, help="MiB per measurement")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    with tempfile.TemporaryDirectory() as directory:
        holder = Identity("bench", Role.WORKER)
        Authority.make(Path(directory), 1).issue(Role.WORKER, [holder], [], datetime.timedelta(hours=1), Path(directory))
        command = [sys.executable, "-m", "benchmarks.tls", "--serve", directory]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            ranks = [LaneRank(0), LaneRank(0, files(directory))]
            addresses = other.stdout.readline().split()
            other.stdin.write(" ".join(rank.server.address for rank in ranks) + "\n")
            other.stdin.flush()
            for rank, address in zip(ranks, addresses, strict=True):
                rank.meet([rank.server.address, address])
                rate(rank, 1 << 20, 16 << 20)
            senders: dict[str, LaneRank] = {"plain": ranks[0], "tls": ranks[1]}
            rows = measure(senders, arguments.sizes, arguments.mib << 20, arguments.rounds)
            for rank in ranks:
                rank.transport.close(1.0)
            other.stdin.close()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    print(f"{'':>20} {'plain':>9} {'tls':>9} {'cost of TLS':>12}")
    for row in rows:
        print(f"{row['what']:>20} {row['plain']:9.2f} {row['tls']:9.2f} {row['cost']:12.0%}")


if __name__ == "__main__":
    main()
