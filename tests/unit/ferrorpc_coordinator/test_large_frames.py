"""One large answer for many sessions: what the coordinator and gRPC hold of it at once."""

import asyncio
import tracemalloc
from functools import partial

import pytest
from ferrorpc_coordinator import write_budget
from ferrorpc_coordinator.driver import Driver
from ferrorpc_coordinator.metrics import Counters
from ferrorpc_coordinator.servicers import CoordinatorServicer
from ferrorpc_coordinator.state.effects import Send
from ferrorpc_coordinator.state.events import Received
from ferrorpc_coordinator.write_budget import LARGE_FRAME_BYTES, WRITING_BYTES_MAX, WriteBudget

from ferrorpc.v1 import session_pb2
from tests.unit.ferrorpc_coordinator.test_driver import ScriptedStateMachine, turns
from tests.unit.ferrorpc_coordinator.test_servicers import HELLO, Call

MEBIBYTE = 1 << 20
SESSIONS = 100
FEW = 16
"""As many as write at once."""


class Reader(Call):
    """A client that says nothing more, and reads nothing before `reads`."""

    def __init__(self, reads, writing):
        super().__init__(HELLO, silent=True)
        self.reads = reads
        self.writing = writing
        self.sequences = []

    async def write(self, data):
        self.writing.append(data)
        await self.reads.wait()
        self.sequences.append(session_pb2.ServerFrame.FromString(data).result.sequence)
        self.writing.remove(data)


class Answered:
    """Clients that have been answered, and have read nothing yet.

    Attributes:
        writing: what is being written to them.
        traced_bytes: memory that was allocated for it, now and at most.
    """

    def __init__(self, answers, count):
        self.driver = Driver(ScriptedStateMachine(answers), None, Counters())
        self.reads, self.writing = asyncio.Event(), []
        self.calls = [Reader(self.reads, self.writing) for _ in range(count)]
        servicer = CoordinatorServicer(self.driver, Counters())
        self.sessions = [asyncio.ensure_future(servicer._session(None, call)) for call in self.calls]

    async def __aenter__(self):
        await turns()
        assert self.driver.sessions == len(self.calls)
        tracemalloc.start()
        try:
            self.driver.receive(1, session_pb2.ClientFrame())
            await turns()
            self.traced_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return self

    async def __aexit__(self, *_):
        """They read, and leave."""
        self.reads.set()
        self.driver.close()
        await asyncio.wait_for(asyncio.gather(*self.sessions), 30)


def answer_of_all(event):
    """One answer for all sessions, each with its own number."""
    if not isinstance(event, Received):
        return []
    overlays = ((stream, session_pb2.ServerFrame(result={"sequence": stream}).SerializeToString()) for stream in streams())
    return [Send(session_pb2.ServerFrame(result={"store": {"value": b"v" * MEBIBYTE}}), tuple(overlays))]


def streams():
    return range(1, SESSIONS + 1)


def test_an_answer_for_many_sessions_is_copied_for_a_few_at_once():
    async def main():
        async with Answered(answer_of_all, SESSIONS) as clients:
            assert WRITING_BYTES_MAX <= sum(map(len, clients.writing)) < WRITING_BYTES_MAX + 2 * MEBIBYTE
            assert clients.traced_bytes[1] < WRITING_BYTES_MAX + 8 * MEBIBYTE
        assert [call.sequences for call in clients.calls] == [[stream] for stream in streams()]

    asyncio.run(main())


def answers_of_their_own(event):
    """A large answer for each of a few sessions."""
    if not isinstance(event, Received):
        return []
    answer = session_pb2.ServerFrame(result={"store": {"value": b"v" * MEBIBYTE}})
    overlay = session_pb2.ServerFrame(result={"sequence": 1}).SerializeToString()
    return [Send(answer, ((stream, overlay),)) for stream in range(1, FEW + 1)]


def test_a_large_frame_that_is_being_written_is_kept_once():
    """Not its parts as well, for as long as the client reads nothing."""

    async def main():
        async with Answered(answers_of_their_own, FEW) as clients:
            assert len(clients.writing) == FEW
            assert clients.traced_bytes[0] < sum(map(len, clients.writing)) + 2 * MEBIBYTE

    asyncio.run(main())


async def stuck(begun, data):
    begun.append(len(data))
    await asyncio.Event().wait()


async def spent(budget, begun):
    """Writes of clients that read nothing, which are all of the budget."""
    write = partial(budget.write, partial(stuck, begun), "job", bytes(MEBIBYTE), b"")
    writes = [asyncio.ensure_future(write()) for _ in range(WRITING_BYTES_MAX >> 20)]
    await turns()
    assert len(begun) == len(writes)
    return writes


def test_small_frames_wait_for_nobody():
    async def main():
        budget, begun = WriteBudget(), []
        writes = await spent(budget, begun)
        for size_bytes in (LARGE_FRAME_BYTES, LARGE_FRAME_BYTES + 1):
            writes.append(asyncio.ensure_future(budget.write(partial(stuck, begun), "job", bytes(size_bytes), b"")))
        await turns()
        assert begun[-1] == LARGE_FRAME_BYTES
        for write in writes:
            write.cancel()
        await asyncio.wait(writes)

    asyncio.run(main())


def test_clients_that_read_nothing_hold_up_the_others_for_a_while_only(monkeypatch):
    monkeypatch.setattr(write_budget, "TURN_SECONDS", 0.02)

    async def main():
        budget, read = WriteBudget(), []
        writes = await spent(budget, [])

        async def write(data):
            read.append(data)

        await asyncio.wait_for(budget.write(write, "job", b"a" * MEBIBYTE, b"b"), 10)
        assert read == [b"a" * MEBIBYTE + b"b"]
        assert not any(write.done() for write in writes)
        for write in writes:
            write.cancel()
        await asyncio.wait(writes)
        assert budget._room_bytes == WRITING_BYTES_MAX  # nothing was given back twice
        assert not budget._waiting

    asyncio.run(main())


def test_a_job_waits_for_one_frame_of_each_other_job_however_many_are_before():
    async def main():
        budget, begun = WriteBudget(), []
        writes = await spent(budget, [])

        async def write(job, data):
            begun.append(job)

        for job in ("a", "a", "a", "b", "b", "c"):
            writes.append(asyncio.ensure_future(budget.write(partial(write, job), job, bytes(MEBIBYTE), b"")))
        await turns()
        assert begun == []
        writes[0].cancel()
        await asyncio.wait(writes[-6:])
        assert begun == ["a", "b", "c", "a", "b", "a"]
        for each in writes:
            each.cancel()
        await asyncio.wait(writes)

    asyncio.run(main())


@pytest.mark.parametrize("turns_before", range(3))
def test_what_ends_while_it_waits_takes_nothing_from_the_budget(turns_before):
    async def main():
        budget, begun = WriteBudget(), []
        writes = await spent(budget, begun)
        waiting = asyncio.ensure_future(budget.write(partial(stuck, begun), "job", bytes(MEBIBYTE), b""))
        await turns()
        writes[0].cancel()
        await turns(turns_before)  # its turn has not come, has just come, or its write has begun
        for write in (waiting, *writes):
            write.cancel()
        await asyncio.wait([waiting, *writes])
        assert budget._room_bytes == WRITING_BYTES_MAX

    asyncio.run(main())
