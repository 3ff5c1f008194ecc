"""Many members of one job in one thread: sessions that join, beat, and arrive at barriers; no tensors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from ferrorpc.v1 import barrier_pb2, identity_pb2, rendezvous_pb2, session_pb2
from ferrorpc.wire import options

STREAMS_PER_CHANNEL = 60
BEAT_SECONDS = 0.5
LEASE_MS = 30_000
"""So long that nobody is given up because this machine is busy."""


class Rank:
    """One member. What it says of itself with each beat can be changed from any thread."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.step = 0
        self.operation_ms = 0
        self.activity = "all_reduce #0"
        self.training: identity_pb2.Training | None = None
        self.generation = 0
        self.rank = -1
        self.sequence = 0
        self.outgoing: asyncio.Queue[session_pb2.ClientFrame | None] = asyncio.Queue()
        self.joined = asyncio.Event()
        self.released = 0
        self.call: Any = None


class Crowd:
    """`size` members of a fixed world, in their first generation once constructed. `close` cuts them all off."""

    def __init__(self, address: str, size: int, job: str, *, hosts: int = 8, prefix: str = "w") -> None:
        self.size = size
        self.job = job
        self.ranks = [Rank(number, f"{prefix}{number:04}") for number in range(size)]
        self._hosts = hosts
        self._address = address
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.do(self._start())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the crowd's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def barrier(self, name: str, ranks: list[int], ordinal: int = 1) -> None:
        """These ranks arrive at a barrier of all."""
        request = barrier_pb2.BarrierRequest(generation=1, name=name, ordinal=ordinal, timeout_ms=600_000)
        self.do(self._ask([self.ranks[rank] for rank in ranks], "barrier", request))

    def cut(self, rank: int) -> None:
        """The member's stream ends without a goodbye."""

        async def cancel() -> None:
            self.ranks[rank].call.cancel()

        self.do(cancel())

    def leave(self) -> None:
        """Everybody says goodbye."""
        self.do(self._ask(self.ranks, "leave", rendezvous_pb2.LeaveRequest(generation=1)))

    def close(self) -> None:
        """Cuts everybody off."""
        self.do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        count = -(-self.size // STREAMS_PER_CHANNEL)
        self._channels = [grpc.aio.insecure_channel(self._address, options=options.session_channel()) for _ in range(count)]
        for rank in self.ranks:
            channel = self._channels[rank.number // STREAMS_PER_CHANNEL]
            self._tasks.append(asyncio.create_task(self._live(rank, channel)))
        await asyncio.gather(*(rank.joined.wait() for rank in self.ranks))
        self.ranks.sort(key=lambda rank: rank.rank)
        self._tasks.append(asyncio.create_task(self._beat()))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _live(self, rank: Rank, channel: grpc.aio.Channel) -> None:
        method = channel.stream_stream(
            "/ferrorpc.v1.CoordinatorService/Session",
            request_serializer=session_pb2.ClientFrame.SerializeToString,
            response_deserializer=session_pb2.ServerFrame.FromString,
        )
        rank.call = call = method()
        hello = session_pb2.Hello(
            protocol_version=1,
            job=self.job,
            name=rank.name,
            instance_id=rank.name,
            lease_ms=LEASE_MS,
            host=f"host-{rank.number * self._hosts // self.size}",
            labels=[identity_pb2.Label(name="pid", value=str(1000 + rank.number))],
        )
        await call.write(session_pb2.ClientFrame(hello=hello))
        policy = rendezvous_pb2.WorldPolicy(min_size=self.size, max_size=self.size)
        join = rendezvous_pb2.JoinRequest(policy=policy, pinned_rank=rank.number, timeout_ms=60_000)
        await self._ask([rank], "join", join)
        writing = asyncio.create_task(self._write(rank))
        try:
            async for frame in call:
                if frame.HasField("result") and frame.result.HasField("join"):
                    rank.generation, rank.rank = frame.result.join.generation, frame.result.join.rank
                    rank.joined.set()
                elif frame.HasField("result") and frame.result.HasField("barrier"):
                    rank.released += 1
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            writing.cancel()

    async def _write(self, rank: Rank) -> None:
        while (frame := await rank.outgoing.get()) is not None:
            await rank.call.write(frame)

    async def _ask(self, ranks: list[Rank], body: str, request: Any) -> None:
        for rank in ranks:
            rank.sequence += 1
            rank.outgoing.put_nowait(session_pb2.ClientFrame(sequence=rank.sequence, **{body: request}))

    async def _beat(self) -> None:
        while True:
            for part in range(10):
                for rank in self.ranks[part::10]:
                    if not rank.call.done():
                        beat = session_pb2.Beat(step=rank.step, activity=rank.activity, generation=rank.generation)
                        rank.outgoing.put_nowait(session_pb2.ClientFrame(beat=self._fill(rank, beat)))
                await asyncio.sleep(BEAT_SECONDS / 10)

    def _fill(self, rank: Rank, beat: session_pb2.Beat) -> session_pb2.Beat:
        """A ring: each rank sends to the next."""
        beat.operation_ms = rank.operation_ms
        if rank.training is not None:
            beat.training.CopyFrom(rank.training)
        beat.links.add(peer_rank=(rank.rank + 1) % self.size, kind="grpc", sent_bytes=rank.step * 1_000_000)
        return beat

    def each(self, change: Callable[[Rank], None]) -> None:
        """Changes every rank."""
        for rank in self.ranks:
            change(rank)
