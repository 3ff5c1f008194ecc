"""A load generator for the coordinator: many sessions on one event loop, each on its own connection.

It implements the Session stream itself, without the client library's threads, so that only the coordinator and the wire are
measured. The coordinator runs in its own process.
"""

from __future__ import annotations

import asyncio
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import grpc
import grpc.aio

from ferrorpc.cli.bench.orderly_end import ended_in_order
from ferrorpc.cli.launcher.exec_shim import tied_to_this_process
from ferrorpc.errors import CoordinatorUnavailableError
from ferrorpc.v1 import rendezvous_pb2, session_pb2, session_pb2_grpc
from ferrorpc.wire import options, status
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.limits import SESSION_PROTOCOL_VERSION

BEAT_SECONDS: Final = 1.0
START_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 60.0
"""For all sessions together. On a busy machine thousands of handshakes take longer than gRPC gives a single attempt."""
TIMEOUT_MS: Final = 60_000


@contextmanager
def coordinator_process(*, durable: bool) -> Iterator[str]:
    """Runs a coordinator on a free loopback port, with or without a journal. Yields its address.

    On Linux it ends with this process, however that ends; call this on the main thread. Ctrl-C reaches this process alone,
    which ends the coordinator.
    """
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="ferrorpc-bench-") as directory:
        kept = ["--data-dir", directory] if durable else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRORPC_")}
        # -P: the user's directory must not shadow what the coordinator imports.
        command = [sys.executable, "-P", "-m", "ferrorpc_coordinator", "--transient", "--listen", "127.0.0.1:0", *kept]
        if sys.platform == "linux":
            command = tied_to_this_process(command)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as process:
            try:
                yield _address(process)
            finally:
                process.terminate()
                try:
                    process.wait(START_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    words = process.stdout.readline().split() if ready else []
    if words[:1] != ["listening"]:
        raise CoordinatorUnavailableError("the coordinator did not start", hint="read its output above")
    return words[1]


class LoadSession:
    """One member's Session stream, with one request in flight at a time."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=options.session_channel())
        self._call = session_pb2_grpc.CoordinatorServiceStub(self._channel).Session(wait_for_ready=True)
        self._sequence = 0
        self._writing = asyncio.Lock()  # gRPC allows one write at a time, and beats are sent between requests

    async def open(self, job: str, name: str) -> None:
        """Connects, sends Hello and waits for Welcome."""
        hello = session_pb2.Hello(protocol_version=SESSION_PROTOCOL_VERSION, job=job, name=name, instance_id=name, host="bench")
        await self._write(session_pb2.ClientFrame(hello=hello))
        while not (frame := await self._read()).HasField("welcome"):
            _raise_if_fenced(frame)

    async def request(self, **body: Any) -> session_pb2.Result:
        """Sends one request (`join=JoinRequest(...)`, `barrier=...`) and waits for its result.

        Raises:
            FerroError: the error that the coordinator returned.
        """
        self._sequence += 1
        await self._write(session_pb2.ClientFrame(sequence=self._sequence, **body))
        while True:
            frame = await self._read()
            if frame.HasField("result") and frame.result.sequence == self._sequence:
                break
            _raise_if_fenced(frame)
        if frame.result.HasField("error"):
            raise restore(frame.result.error)
        return frame.result

    async def beat(self) -> None:
        """Sends one heartbeat."""
        await self._write(session_pb2.ClientFrame(beat=session_pb2.Beat(step=self._sequence)))

    async def leave(self) -> None:
        """Leaves the job and ends the stream."""
        await self.request(leave=rendezvous_pb2.LeaveRequest())
        await self._call.done_writing()

    async def close(self) -> None:
        """Drops the connection."""
        self._call.cancel()
        await self._channel.close()

    async def _write(self, frame: session_pb2.ClientFrame) -> None:
        try:
            async with self._writing:
                await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise status.error_of(error, "the coordinator") from None

    async def _read(self) -> session_pb2.ServerFrame:
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise status.error_of(error, "the coordinator") from None
        if isinstance(frame, session_pb2.ServerFrame):
            return frame
        raise CoordinatorUnavailableError(f"the coordinator ended a session: {await self._call.details()}")


@asynccontextmanager
async def sessions(address: str, job: str, count: int) -> AsyncIterator[tuple[list[LoadSession], float]]:
    """Yields `count` open sessions, which send a beat every second, and the seconds it took to connect them all."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    members = [LoadSession(address) for _ in range(count)]
    try:
        await _open(members, address, job)
        connecting = loop.time() - began
        beats = asyncio.create_task(_beat(members))
        try:
            yield members, connecting
        finally:
            beats.cancel()
    finally:
        await asyncio.gather(*(member.close() for member in members))


async def _open(members: Sequence[LoadSession], address: str, job: str) -> None:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.gather(*(member.open(job, f"member-{number}") for number, member in enumerate(members)))
    except TimeoutError:
        late = f"{len(members)} sessions did not connect to {address} within {CONNECT_SECONDS:g} s"
        raise CoordinatorUnavailableError(late, hint="measure fewer, or on a machine that does nothing else") from None


async def join(members: Sequence[LoadSession]) -> list[rendezvous_pb2.JoinResponse]:
    """Lets the members form a generation together."""
    policy = rendezvous_pb2.WorldPolicy(min_size=len(members), max_size=len(members))
    request = rendezvous_pb2.JoinRequest(policy=policy, pinned_rank=-1, hinted_rank=-1, timeout_ms=TIMEOUT_MS)
    results = await asyncio.gather(*(member.request(join=request) for member in members))
    return [result.join for result in results]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, best and worst, in milliseconds."""
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "best_ms": round(min(seconds) * 1e3, 3),
        "worst_ms": round(max(seconds) * 1e3, 3),
    }


async def _beat(members: Iterable[LoadSession]) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        for member in members:
            await member.beat()


def _raise_if_fenced(frame: session_pb2.ServerFrame) -> None:
    if frame.event.HasField("fenced"):
        raise restore(frame.event.fenced)
