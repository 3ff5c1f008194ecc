"""Sends begin to leave in the order of their calls, and nothing is remembered of tags for which nothing is under way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.collectives.point_to_point import SEND, RecvExecution, SendExecution, SendQueues
from ferrorpc.errors import CollectiveTimeoutError, FerroError
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing import run_world
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_BYTES, EAGER_CHUNKS
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.transports.point_to_point import ANY_NUMBER
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Header, Key
from tests.unit.collectives.lane import Lane


class Sender:
    def __init__(self, room: int) -> None:
        self.lane = Lane(room)
        self.lines = SendQueues()

    def call(self, number: int, tag: int = 0, size: int = 1) -> SendExecution:
        data = np.full(size, number, np.uint8)
        guard = Guard(SYSTEM_CLOCK, Latch(), 30.0)
        made = SendExecution(self.lane, 0, self.lines, data, TensorSpec(DType.UINT8, (size,)), 1, tag, guard)
        made.wake = lambda: None
        return made


def recv_on(lane: Lane) -> RecvExecution:
    made = RecvExecution(lane, 0, 1, 0, None, None, Guard(SYSTEM_CLOCK, Latch(), 30.0))
    made.wake = lambda: None
    return made


@pytest.fixture
def sender() -> Sender:
    return Sender(room=100)


def test_a_send_that_is_driven_first_waits_for_the_one_called_before_it_and_follows_it_at_once(sender: Sender) -> None:
    first, second, other = sender.call(1), sender.call(2), sender.call(3, tag=5)
    assert not second.advance()
    assert other.advance()
    assert first.advance()
    assert sender.lane.gone == [(5, 3), (0, 1), (0, 2)]
    assert second.advance()


def test_only_the_first_chunk_is_waited_for(sender: Sender) -> None:
    sender.lane.room = 1
    first, second = sender.call(1, size=2 * CHUNK_BYTES), sender.call(2)
    assert not first.advance()
    sender.lane.room = 1
    assert second.advance()
    sender.lane.room = 1
    assert first.advance()
    assert sender.lane.gone == [(0, 1), (0, 2), (0, 1)]


def test_a_send_that_gives_up_lets_the_next_one_go(sender: Sender) -> None:
    first, second = sender.call(1, tag=9), sender.call(2, tag=9)
    for one in (first, second):
        assert not one.advance()
        one.finish()
    assert not sender.lines._waiting


def test_a_peer_that_could_not_be_reached_is_told_with_its_address(sender: Sender) -> None:
    """Else its name stands for a rank that is late."""
    sender.lane.room = 0
    send = sender.call(1)
    recv = RecvExecution(sender.lane, 0, 1, 5, None, None, Guard(SYSTEM_CLOCK, Latch(), 30.0))
    assert "not reached" not in f"{send.timeout_error()} {recv.timeout_error()}"
    sender.lane.not_reached[1] = "not reached at 10.0.0.2:7000 in 14.9 s"
    for waiting in (send, recv):
        assert str(waiting.timeout_error()).partition("\n")[0].endswith("; rank 1 was not reached at 10.0.0.2:7000 in 14.9 s")
    for waiting in (send, recv):
        assert "firewalls" in str(waiting.timeout_error())
    sender.lane.lost_links[1] = "its stream broke"
    for waiting in (send, recv):
        text, _, hint = str(waiting.timeout_error()).partition("\n")
        assert text.endswith("; its link was lost: its stream broke")
        assert "once it answers again" in hint
    sender.lane.lost_links[1] = PEER_LEFT
    for waiting in (send, recv):
        assert str(waiting.timeout_error()).partition("\n")[0].endswith("; it said goodbye")


def test_of_a_message_that_is_under_way_it_is_told_how_much_and_nothing_of_firewalls(sender: Sender) -> None:
    sender.lane.room, total = EAGER_CHUNKS, EAGER_BYTES + 2 * CHUNK_BYTES
    send, recv = sender.call(1, size=total), recv_on(sender.lane)
    for waiting in (send, recv):
        assert not waiting.advance()
        assert "bytes" not in waiting.explain(), "what leaves before it is granted does not say that the peer is there"
    mailbox, sender.lane.room = sender.lane.mailbox, 1
    mailbox.granted(1, Key(0, POINT_TO_POINT, 1), 0)
    header = Header(0, SEND, DType.UINT8, (total,), total)
    mailbox.deliver(Frame(Key(0, POINT_TO_POINT, 1), 1, header, 0, memoryview(bytes(CHUNK_BYTES))))
    sender.lane.not_reached[1] = "not reached at 10.0.0.2:7000 in 14.9 s"
    for waiting, told in (
        (send, f"{5 * CHUNK_BYTES} of {total} bytes are on their way"),
        (recv, f"{CHUNK_BYTES} of {total} bytes have come"),
    ):
        text, _, hint = str(waiting.timeout_error()).partition("\n")
        assert text.endswith(f": {told}")
        assert "firewalls" not in hint
    sender.lane.lost_links[1] = "its stream broke"
    for waiting in (send, recv):
        assert waiting.explain().endswith("; its link was lost: its stream broke")


def test_a_send_that_gives_up_in_the_middle_of_its_line_takes_nobody_elses_place(sender: Sender) -> None:
    sender.lane.room = 0
    sends = [sender.call(number) for number in (1, 2, 3)]
    for one in sends:
        assert not one.advance()
    sends[1].finish()
    sender.lane.room = 100
    assert sends[0].advance()
    assert sends[2].advance()
    assert sender.lane.gone == [(0, 1), (0, 3)]


def test_no_tag_is_remembered_once_its_messages_have_been_taken_or_nobody_waits_for_them_any_more() -> None:
    def body(group: Any) -> tuple[int, int, int]:
        other = 1 - group.rank
        for tag in range(200):
            group.send(float(tag), other, tag=tag, async_op=tag % 2 == 0)
            assert group.recv(other, tag=tag) == tag
            with pytest.raises(CollectiveTimeoutError):
                group.recv(other, tag=1000 + tag, timeout=0.001)
        backend = group._backend
        mailbox = backend.transport.mailbox
        return len(backend._send_queues._waiting), len(mailbox._inbound), len(mailbox._sending)

    assert run_world(2, body) == [(0, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_message_that_comes_as_its_recv_gives_up_is_for_the_next_one(size: int) -> None:
    """Another thread may have put it together before the driver looks at the time."""
    lane, key = Lane(0), Key(0, POINT_TO_POINT, 1)
    late, following = recv_on(lane), recv_on(lane)
    assert not late.advance()
    lane.mailbox.deliver(Frame(key, 1, Header(0, "send", DType.UINT8, (size,), size), 0, memoryview(bytes(range(size)))))
    late.finish()
    assert following.advance()
    assert following.results[0].tolist() == list(range(size))
    following.finish()
    assert not lane.mailbox._inbound


def test_what_a_recv_has_asked_for_comes_although_it_gave_up_and_there_is_more_than_may_come_unasked() -> None:
    lane, total = Lane(0), 2 * EAGER_BYTES + CHUNK_BYTES
    reported: list[FerroError] = []
    lane.mailbox = Mailbox(0, reported.append, EAGER_BYTES)

    def arrive(first: int, last: int) -> None:
        header = Header(0, SEND, DType.UINT8, (total,), total)
        for offset in range(first, last, CHUNK_BYTES):
            lane.mailbox.deliver(Frame(Key(0, POINT_TO_POINT, 1), 1, header, offset, memoryview(bytes(CHUNK_BYTES))))

    late, following = recv_on(lane), recv_on(lane)
    assert not late.advance()
    arrive(0, EAGER_BYTES)
    late.finish()
    arrive(EAGER_BYTES, total)
    assert reported == []
    assert following.advance()
    assert following.results[0].size == total


def test_a_recv_that_was_interrupted_when_its_message_was_taken_can_go_on(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting thread advances it, and after an interrupt the progress thread does."""
    mailbox, spec = sender.lane.mailbox, TensorSpec(DType.UINT8, (4,))
    recv = recv_on(sender.lane)
    frame = Frame(Key(0, POINT_TO_POINT, 1), 1, Header(0, SEND, spec.dtype, spec.shape, 4), 0, memoryview(b"abcd"))
    mailbox.deliver(frame)
    take = mailbox.take

    def interrupted(*arguments: Any) -> None:
        take(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(mailbox, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recv.advance()
    monkeypatch.setattr(mailbox, "take", take)
    assert recv.advance()
    assert recv.results[0].tobytes() == b"abcd"


def test_a_recv_asks_about_its_own_message_once_that_has_begun_and_nothing_once_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread may be held up between its last look and the question, while the message comes and its sender leaves."""
    lane, spec, asked = Lane(0), TensorSpec(DType.UINT8, (4,)), list[int]()
    monkeypatch.setattr(lane, "probe", lambda peer, key, signature: asked.append(key.number))
    recv = recv_on(lane)
    assert not recv.advance()
    recv.probe()
    for offset in (0, 2):
        header = Header(0, SEND, spec.dtype, spec.shape, 4)
        lane.mailbox.deliver(Frame(Key(0, POINT_TO_POINT, 7), 1, header, offset, memoryview(b"ab")))
        recv.probe()
    assert recv.advance()
    recv.probe()
    assert asked == [ANY_NUMBER, 7]
