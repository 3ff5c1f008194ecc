"""A lane that dials again sends all of its frames in the new call, whatever the threads of gRPC do for the old one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.transports.grpc.lane import Lane
from ferrorpc.v1 import transport_pb2

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


class Channel:
    """Refuses the first call once its Open was written. gRPC's thread asks for the next message as the second call begins."""

    def __init__(self) -> None:
        self.calls: list[Iterator[bytes]] = []
        self.of_the_old_call: list[bytes] = []
        self.of_the_new_call: list[bytes] = []
        self.all_sent = threading.Event()

    def stream_stream(self, method: str) -> Callable[[Iterator[bytes]], Call]:
        return self.call

    def call(self, messages: Iterator[bytes]) -> Call:
        self.calls.append(messages)
        assert next(messages) == b"open"
        return Call(self.refuse() if len(self.calls) == 1 else self.accept())

    def refuse(self) -> Iterator[bytes]:
        raise Refused
        yield b""

    def accept(self) -> Iterator[bytes]:
        old = threading.Thread(target=lambda: self.of_the_old_call.extend(self.calls[0]))
        old.start()
        old.join(SECONDS / 20)
        self.of_the_new_call += [next(self.calls[1]) for _ in range(3)]
        self.all_sent.set()
        yield from ()

    def close(self) -> None:
        """Nothing is open."""


class Owner:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def lane_answered(self, lane: Lane, message: transport_pb2.ControlMessage) -> None:
        """There are no answers here."""

    def lane_ended(self, lane: Lane, reason: str) -> None:
        self.reasons.append(reason)


def test_a_call_that_was_given_up_takes_no_frame() -> None:
    channel, owner = Channel(), Owner()
    link: Any = channel
    lane = Lane(1, 0, "nowhere:1", link, b"open", lambda: None, owner, SYSTEM_CLOCK, SECONDS)
    for number in range(3):
        assert lane.queue.reserve(1, lambda: None)
        lane.queue.put_frame(b"%d" % number, 1)
    assert channel.all_sent.wait(SECONDS)
    lane.wait(SECONDS)
    assert (channel.of_the_old_call, channel.of_the_new_call) == ([], [b"0", b"1", b"2"])
    assert owner.reasons == ["the stream ended without a goodbye"]
