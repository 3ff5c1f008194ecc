"""How a rank greets the other ranks of its host, and what one of them that is silent costs."""

import contextlib
import errno
import itertools
import os
import uuid

import pytest

from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import GroupAbortedError
from ferrorpc.guard import SYSTEM_CLOCK, Latch, SystemClock
from ferrorpc.transports.shared_memory import handshake
from ferrorpc.transports.shared_memory.segment import NONCE_BYTES, SIZE_BYTES_MIN, Segment
from ferrorpc.v1.shared_memory_pb2 import SharedMemoryOffer
from tests.unit.transports.shared_memory.host_worlds import HostWorld


class SlowOrStanding(SystemClock):
    """A clock that goes on by this much whenever somebody looks."""

    def __init__(self, step_seconds: float) -> None:
        self._times = itertools.count(0.0, step_seconds)

    def now(self) -> float:  # type: ignore[override]
        return next(self._times)


@pytest.mark.parametrize(("step_seconds", "reached"), [(0.0, [2]), (0.3, [0, 1, 2])])
def test_no_rank_is_dialled_while_another_may_still_answer(step_seconds: float, reached: list[int]) -> None:
    """Each dial has a descriptor on its way, and the kernel lets a user have few more than one process may have open."""
    name = f"ferrorpc/test/{uuid.uuid4()}"
    offers = [SharedMemoryOffer(socket=f"{name}/{rank}") for rank in range(4)]
    segment = Segment("test", bytes(NONCE_BYTES), SIZE_BYTES_MIN)
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(handshake.listen(offer.socket)) for offer in offers]
        assignment = LocalWorld(4).session(3).membership.assignment
        handshaker = handshake.Handshaker(assignment, range(4), offers, listeners[3], segment)
        latch = Latch()
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.3, lambda: latch.trip(GroupAbortedError(0, "over")) and None)
        handshaker.run(latch if not step_seconds else Latch(), SlowOrStanding(step_seconds))
        dialled = []
        for rank, listener in enumerate(listeners):
            with contextlib.suppress(BlockingIOError):
                sockets.enter_context(listener.accept()[0])
                dialled.append(rank)
    segment.close()
    assert dialled == reached
    assert sorted(handshaker.failures) == [0, 1, 2]


def test_a_rank_that_cannot_greet_keeps_no_others_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who dials it learns so at once, and goes on to the next. All warn of what they will do without."""
    descriptor_of = Segment.read_only_descriptor

    def full_in_rank_1(segment: Segment) -> int:
        if os.readlink(f"/proc/self/fd/{segment._descriptor}").endswith("-1 (deleted)"):
            raise OSError(errno.EMFILE, "Too many open files")
        return descriptor_of(segment)

    monkeypatch.setattr(Segment, "read_only_descriptor", full_in_rank_1)
    with HostWorld(3) as ranks:
        for rank in range(3):
            assert ranks[rank].hosts == ((0, 2), (1,))
            assert "rank 1: it cannot greet its peers: Too many open files" in ranks[rank].separation_reason
            assert f"rank {rank} uses gRPC to ranks of its own host: " in caplog.text
