"""A lane dials again until it is answered, and sends all frames in the new call, whatever gRPC's threads do for the old one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from ferrorpc.errors import AuthenticationError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.transports.grpc.lane import Lane
from ferrorpc.v1 import transport_pb2
from tests.waiting import eventually

SECONDS = 10.0


class Refused(grpc.RpcError):
    """As of a proxy whose backend is not up yet."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "upstream connect error"


class Call:
    """A call as the lane sees it: answers by `answers`."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        self._answers = answers

    def __iter__(self) -> Iterator[bytes]:
        return self._answers

    def cancel(self) -> None:
        """Its answers end when the test says so."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False  # as of a call that has ended


class Channel:
    """Refuses the first call once its Open was written, and answered with these answers. gRPC's thread asks for the next
    message as the second call begins."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = answers
        self.calls: list[Iterator[bytes]] = []
        self.of_the_old_call: list[bytes] = []
        self.of_the_new_call: list[bytes] = []
        self.all_sent = threading.Event()
        self.is_closed = False

    def stream_stream(self, method: str) -> Callable[[Iterator[bytes]], Call]:
        return self.call

    def call(self, messages: Iterator[bytes]) -> Call:
        self.calls.append(messages)
        assert next(messages) == b"open"
        return Call(self.refuse() if len(self.calls) == 1 else self.accept())

    def refuse(self) -> Iterator[bytes]:
        yield from self.answers
        raise Refused

    def accept(self) -> Iterator[bytes]:
        old = threading.Thread(target=lambda: self.of_the_old_call.extend(self.calls[0]))
        old.start()
        old.join(SECONDS / 20)
        self.of_the_new_call += [next(self.calls[1]) for _ in range(3)]
        self.all_sent.set()
        yield from ()

    def close(self) -> None:
        self.is_closed = True


class Accepting(Channel):
    """Accepts every call, and ends it at once."""

    def call(self, messages: Iterator[bytes]) -> Call:
        self.calls.append(messages)
        return Call(iter(()))


class Deaf(Channel):
    """Nobody is told of the end of its calls."""

    def call(self, messages: Iterator[bytes]) -> Call:
        call = super().call(messages)
        call.add_callback = lambda callback: True  # type: ignore[method-assign]
        return call


class Owner:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def lane_answered(self, lane: Lane, message: transport_pb2.ControlMessage) -> None:
        """There are no answers here."""

    def lane_ended(self, lane: Lane, reason: str) -> None:
        self.reasons.append(reason)


def dialled(channel: Any, owner: Owner) -> Lane:
    return Lane(1, 0, "nowhere:1", lambda: channel, b"open", lambda: None, owner, SYSTEM_CLOCK, SECONDS)


def test_a_call_that_was_given_up_takes_no_frame() -> None:
    channel, owner = Channel(), Owner()
    lane = dialled(channel, owner)
    for number in range(3):
        assert lane.queue.reserve(1, lambda: None)
        lane.queue.put_frame(b"%d" % number, 1)
    assert channel.all_sent.wait(SECONDS)
    assert eventually(lambda: owner.reasons) == ["the stream ended without a goodbye"]
    assert (channel.of_the_old_call, channel.of_the_new_call) == ([], [b"0", b"1", b"2"])


def test_every_attempt_is_made_with_the_files_of_its_time() -> None:
    """Those of the first attempt may have expired, and their renewal may be half written then."""
    expired, renewed, owner = Channel(), Accepting(), Owner()
    dials: list[Any] = [expired, AuthenticationError("the certificate has expired"), renewed]

    def dial() -> Any:
        found = dials.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    lane = Lane(1, 0, "nowhere:1", dial, b"open", lambda: None, owner, SYSTEM_CLOCK, SECONDS)
    assert eventually(lambda: owner.reasons) == ["the stream ended without a goodbye"]
    assert (len(expired.calls), len(renewed.calls), dials) == (1, 1, [])
    assert expired.is_closed
    assert renewed.is_closed
    assert lane.fault is None


def test_a_channel_whose_thread_of_grpc_has_ended_is_not_waited_for_when_the_lane_dials_again() -> None:
    dead, accepting, owner = Deaf(), Accepting(), Owner()
    dials: list[Any] = [dead, accepting]
    Lane(1, 0, "nowhere:1", lambda: dials.pop(0), b"open", lambda: None, owner, SYSTEM_CLOCK, SECONDS)
    assert eventually(lambda: owner.reasons) == ["the stream ended without a goodbye"]
    assert not dead.is_closed, "to close it would wait for that thread for ever"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\xff", "its answers are no messages of ours"),
        (transport_pb2.ControlMessage(opened=transport_pb2.Opened(generation=1)).SerializeToString(), "UNAVAILABLE"),
    ],
    ids=["by a stranger", "by the peer"],
)
def test_a_lane_that_was_answered_is_not_dialled_again(answer: bytes, reason: str) -> None:
    channel, owner = Channel(answer), Owner()
    dialled(channel, owner)
    (ended,) = eventually(lambda: owner.reasons)
    assert ended.startswith(reason)
    assert len(channel.calls) == 1
