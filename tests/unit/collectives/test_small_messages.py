"""What needs no waiting is sent and received at once; all else is left to the general path as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc import ProcessGroup
from ferrorpc.collectives.point_to_point import SEND, SendExecution, SendQueues
from ferrorpc.collectives.small_messages import SmallMessages, SmallReceive
from ferrorpc.errors import FerroError, LimitExceededError, StoreTimeoutError
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing import FaultPlan, run_world
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_BYTES
from ferrorpc.transports.inproc import InprocTransport
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Header, Key
from tests.unit.collectives.lane import Lane

U8 = DType.UINT8
PEER, TAG = 1, 5


class Small:
    """The small messages of rank 0 of two."""

    def __init__(self, room: int = 100) -> None:
        self.lane = Lane(room)
        self.queues = SendQueues()
        self.aborted: list[FerroError] = []
        self.messages = SmallMessages(self.lane, 0, (0, PEER), self.queues, Latch(lambda error, _: self.aborted.append(error)))

    def send(self, number: int, size: int = 1, tag: int = TAG) -> bool:
        return self.messages.send(np.full(size, number, np.uint8), TensorSpec(U8, (size,)), PEER, tag)

    def general(self, number: int, tag: int = TAG) -> SendExecution:
        guard = Guard(SYSTEM_CLOCK, Latch(), 30.0)
        return SendExecution(self.lane, 0, self.queues, np.full(1, number, np.uint8), TensorSpec(U8, (1,)), PEER, tag, guard)

    def arrive(self, number: int, data: bytes, total: int | None = None, offset: int = 0) -> None:
        size = len(data) if total is None else total
        header = Header(TAG, SEND, U8, (size,), size)
        self.lane.mailbox.deliver(Frame(Key(0, POINT_TO_POINT, number), PEER, header, offset, memoryview(data)))

    def recv(self) -> SmallReceive:
        return SmallReceive(self.messages, PEER, TAG)

    def take(self) -> bytes:
        """The next message."""
        small = self.recv()
        assert small.has_come(None)
        found = small.copy(None).tobytes()
        small.take()
        return found


@pytest.fixture
def small() -> Small:
    return Small()


# Sends.


@pytest.mark.parametrize("size", [1, CHUNK_BYTES])
def test_what_fits_a_chunk_is_sent_at_once(small: Small, size: int) -> None:
    assert small.send(7, size)
    assert small.lane.gone == [(TAG, 7)]


def test_more_than_a_chunk_is_left_to_the_general_path(small: Small) -> None:
    assert not small.send(7, CHUNK_BYTES + 1)
    assert small.lane.gone == []


def test_nothing_is_sent_where_the_lane_is_full() -> None:
    small = Small(room=0)
    assert not small.send(7)
    assert small.lane.gone == []


def test_none_overtakes_a_send_to_the_same_place_that_has_not_begun(small: Small) -> None:
    waiting = small.general(1)
    assert not small.send(2)
    assert small.send(3, tag=TAG + 1)
    waiting.wake = lambda: None
    assert waiting.advance()
    assert small.send(2)
    assert small.lane.gone == [(TAG + 1, 3), (TAG, 1), (TAG, 2)]


def failing_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The lane's method raises what a signal handler may raise, which Python calls wherever it is."""

    def failing(*_: Any) -> bool:
        raise ArithmeticError("of a signal handler")

    monkeypatch.setattr(Lane, name, failing)


# Recvs.


@pytest.mark.parametrize("data", [b"\1", b"\1\2\3"])
def test_a_message_that_is_here_is_taken_at_once(small: Small, data: bytes) -> None:
    small.arrive(1, data)
    assert small.take() == data
    assert not small.lane.mailbox._inbound


def test_an_empty_message_is_left_to_the_general_path_because_it_may_claim_any_shape(small: Small) -> None:
    small.arrive(1, b"")
    recv = small.recv()
    assert not recv.has_come(None)
    recv.put_back()
    assert small.lane.mailbox._inbound


def test_a_message_of_which_a_part_is_missing_is_left_to_the_general_path(small: Small) -> None:
    small.arrive(1, b"\1\2", total=3)
    recv = small.recv()
    assert not recv.has_come(None)
    recv.put_back()
    small.arrive(1, b"\3", total=3, offset=2)
    general = small.recv()
    small.lane.mailbox.post(general)
    assert general.message is not None
    assert [bytes(frame.payload) for frame in general.message.frames] == [b"\1\2", b"\3"]


@pytest.mark.parametrize("wanted", [TensorSpec(DType.INT8, (1,)), TensorSpec(U8, (2,)), TensorSpec(U8, ())])
def test_a_message_that_does_not_fit_stays(small: Small, wanted: TensorSpec) -> None:
    small.arrive(1, b"\1")
    recv = small.recv()
    assert not recv.has_come(wanted)
    recv.put_back()
    assert small.take() == b"\1"


def test_none_is_taken_before_those_that_were_posted_earlier(small: Small) -> None:
    earlier, later = small.recv(), small.recv()
    small.lane.mailbox.post(earlier)
    small.arrive(1, b"\1")
    assert not later.has_come(None)
    later.put_back()
    assert earlier.message is not None


@pytest.mark.parametrize("taken", [False, True])
def test_what_is_put_back_is_the_next_recvs_and_before_those_that_follow(small: Small, taken: bool) -> None:
    small.arrive(1, b"\1")
    small.arrive(2, b"\2")
    recv = small.recv()
    assert recv.has_come(None)
    if taken:
        recv.take()
    for _ in range(2):  # an interrupt may let it be called twice
        recv.put_back()
    assert [small.take(), small.take()] == [b"\1", b"\2"]
    assert not small.lane.mailbox._inbound
    assert not small.lane.mailbox._unexpected_bytes


def test_one_that_never_came_leaves_nothing(small: Small) -> None:
    recv = small.recv()
    assert not recv.has_come(None)
    recv.put_back()
    assert not small.lane.mailbox._inbound


def test_a_message_goes_into_the_callers_array(small: Small) -> None:
    small.arrive(1, b"\1\2")
    recv, out = small.recv(), np.zeros(2, np.uint8)
    assert recv.has_come(TensorSpec(U8, (2,)))
    assert recv.copy(out) is out
    assert out.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("total", "chunks"), [(3, [b"\1", b"\2", b"\3"]), (0, [b""]), (EAGER_BYTES + 1, [b"\1"])], ids=["chunks", "empty", "grant"]
)
def test_it_reads_until_all_is_here_that_comes_without_a_grant(
    small: Small, monkeypatch: pytest.MonkeyPatch, total: int, chunks: list[bytes]
) -> None:
    found = list[bool]()

    def poll(_: Lane, peer: int, over: Callable[[], bool]) -> None:
        for offset, chunk in enumerate(chunks):
            found.append(over())
            small.arrive(1, chunk, total, offset)
        found.append(over())

    monkeypatch.setattr(Lane, "busy_poll", poll)
    recv = small.recv()
    assert not recv.has_come(None)
    assert found == [False] * len(chunks) + [True]
    recv.put_back()


def test_where_a_message_that_was_read_may_be_lost_the_generation_ends(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_in(monkeypatch, "busy_poll")
    with pytest.raises(ArithmeticError):
        small.recv().has_come(None)
    assert [str(error).splitlines()[0] for error in small.aborted] == [
        "ArithmeticError: of a signal handler during recv(from rank 1, tag=5)"
    ]


# Within a group.


@pytest.mark.parametrize("has_begun", [True, False], ids=["its first chunk is here", "nothing is here"])
def test_the_rest_of_a_long_message_is_polled_for_too(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    """Otherwise the thread would sleep at once, and be woken for what comes within a moment. But nobody polls twice in vain."""
    polls = list[bool]()
    monkeypatch.setattr(InprocTransport, "busy_poll", lambda transport, peer, over: polls.append(over()))

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(np.ones(2 * CHUNK_BYTES, np.uint8), 1)
            return
        inbound, parker = group._backend.transport.mailbox._inbound, group.session.clock.parker()
        while has_begun and not inbound:
            parker.park(group.session.clock.now() + 1e-3)
        assert group.recv(0).size == 2 * CHUNK_BYTES

    run_world(2, body, faults=FaultPlan(delay_seconds=(0.0, 1.0)), seed=0)
    assert polls == [False]


def test_long_and_short_messages_of_one_tag_come_in_their_order() -> None:
    sizes = [1, 3 * CHUNK_BYTES, 0, 5 * CHUNK_BYTES + 1, 2, 2 * CHUNK_BYTES, 1]

    def body(group: ProcessGroup) -> list[tuple[int, int]]:
        other = 1 - group.rank
        works = [group.send(np.full(size, number, np.uint8), other, async_op=True) for number, size in enumerate(sizes)]
        found = [group.recv(other) for _ in sizes]
        for work in works:
            work.wait()
        return [(each.size, int(each[0]) if each.size else -1) for each in found]

    expected = [(size, number if size else -1) for number, size in enumerate(sizes)]
    for seed in range(5):
        assert run_world(2, body, seed=seed) == [expected, expected]


@pytest.mark.parametrize(
    "call",
    [lambda group: group.send(np.arange(3), 1), lambda group: group.send(np.arange(3), 1, async_op=True).wait()],
    ids=["blocking", "asynchronous"],
)
@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (MemoryError("8 TiB"), LimitExceededError),
        (StoreTimeoutError("of a handler"), StoreTimeoutError),
        (ArithmeticError("of a handler"), (ArithmeticError, FerroError)),
    ],
    ids=["memory", "of this library", "of Python"],
)
def test_where_nobody_knows_whether_a_message_was_sent_the_generation_ends(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, found: Any, call: Callable[[ProcessGroup], Any]
) -> None:
    """A signal handler may have raised it after the message went out: to send it once more could send it twice."""
    honest, sent = InprocTransport.send, list[bool]()

    def send(*arguments: Any) -> bool:
        sent.append(honest(*arguments))
        raise raised

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            monkeypatch.setattr(InprocTransport, "send", send)
            with pytest.raises(found, match=r"8 TiB|of a handler"):
                call(group)
            assert not group._backend._send_queues._waiting
        with pytest.raises(FerroError, match=r"8 TiB|of a handler"):
            group.barrier()

    run_world(2, body, timeout=10.0)
    assert sent == [True]


def test_no_execution_is_made_for_a_message_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this is for: so that a change which makes all calls take the general path is seen."""

    def body(group: ProcessGroup) -> list[int]:
        if group.rank == 0:
            group.send(np.arange(3), 1)
        group.barrier()
        monkeypatch.setattr(group._backend, "start_send", None)
        monkeypatch.setattr(group._backend, "start_recv", None)
        if group.rank == 0:
            group.send(2.5, 1, tag=8)
            assert group.send(np.arange(2), 1, tag=9, async_op=True).wait() is None
            return []
        found = group.recv(0).tolist()
        group.session.clock.parker().park(1.0)
        out = np.zeros(2, np.int64)
        return [*found, float(group.recv(0, tag=8)), group.recv(0, tag=9, out=out) is out, *out]

    assert run_world(2, body) == [[], [0, 1, 2, 2.5, True, 0, 1]]


def test_the_last_operation_of_a_rank_is_shown_with_its_arguments() -> None:
    def body(group: ProcessGroup) -> str:
        if group.rank == 0:
            group.send(np.arange(3), 1, tag=4)
        else:
            group.recv(0, tag=4)
        return group.session.activity.last

    assert run_world(2, body) == ["send(int64[3] to rank 1, tag=4)", "recv(from rank 0, tag=4)"]
