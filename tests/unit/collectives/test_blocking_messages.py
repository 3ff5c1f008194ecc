"""Collectives over a backend's own send and recv: what goes out, in what order, and what becomes of a send that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from ferrorpc.collectives.algorithms import direct, ring
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.blocking import SLICE_SECONDS, BlockingPrepared, message_tag
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.ranks_and_tags import TAG_MAX
from ferrorpc.errors import CollectiveTimeoutError, PeerLostError
from ferrorpc.guard import Guard, Latch
from ferrorpc.testing import ManualClock
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key

KEY = Key(0, 0, 1)


class LateClock(ManualClock):
    """Its threads run only when somebody waits, or at once where `late` is False; a thread that is `stuck` never does."""

    def __init__(self, late: bool = True, stuck: bool = False) -> None:
        super().__init__()
        self.late = late
        self.stuck = stuck
        self.bodies: deque[Callable[[], None]] = deque()

    def start(self, body: Callable[[], None], name: str) -> None:
        self.bodies.append(body)
        if not self.late:
            self.park(0.0)

    def parker(self) -> LateClock:  # type: ignore[override]
        return self

    def park(self, until: float) -> bool:
        if self.stuck:
            self.advance(until - self.now())
        while self.bodies and not self.stuck:
            self.bodies.popleft()()
        return not self.stuck

    def unpark(self) -> None:
        """Whoever waits has just run what it waits for."""


class Posts:
    """Group rank 0 of some, whose sends to `lost` fail."""

    def __init__(self, size: int, lost: int | None = None) -> None:
        self.rank, self.size = 0, size
        self.world_ranks = tuple(range(10, 10 + size))
        self.lost = lost
        self.sent: list[tuple[int, bytes]] = []
        self.received: list[int] = []
        self.timeouts: list[float | None] = []
        self.on_recv: Callable[[], None] = lambda: None

    def send(self, data: np.ndarray, dst: int, tag: int = 0) -> None:
        if dst == self.lost:
            raise PeerLostError(self.world_ranks[dst], "gone")
        self.sent.append((dst, data.tobytes()))

    def recv(self, src: int, tag: int = 0, out: np.ndarray | None = None, timeout: float | None = None) -> np.ndarray:
        self.received.append(src)
        self.timeouts.append(timeout)
        self.on_recv()
        return np.full(2, 100.0, np.float32)


def started(posts: Posts, clock: LateClock, call: Call, plan: Plan, inputs: list[np.ndarray], *out: np.ndarray) -> Execution:
    return BlockingPrepared(posts, call, plan).start(KEY, inputs, list(out) or None, Guard(clock, Latch(), 5.0))


def spec(count: int) -> TensorSpec:
    return TensorSpec(DType.FLOAT32, (count,))


def scatter(posts: Posts, clock: LateClock) -> Execution:
    parts = [np.full(2, rank, np.float32) for rank in range(posts.size)]
    call = Call(Operation.SCATTER, (spec(2),) * posts.size, root=0)
    return started(posts, clock, call, direct.scatter(0, posts.size, 0), parts)


def test_it_is_over_when_all_is_sent() -> None:
    posts = Posts(3)
    assert scatter(posts, LateClock()).advance()
    assert posts.sent == [(rank, np.full(2, rank, np.float32).tobytes()) for rank in (1, 2)]


def test_a_send_takes_what_the_array_held_although_the_result_is_written_there_before_it_leaves() -> None:
    posts, x = Posts(2), np.array([1, 2, 3, 4], np.float32)
    call = Call(Operation.ALL_REDUCE, (spec(4),), ReduceOp.SUM)
    assert started(posts, LateClock(), call, direct.all_reduce_two_shot(4, 0, 2), [x], x).advance()
    assert x.tolist() == [101, 102, 100, 100]
    assert posts.sent == [(1, np.array(part, np.float32).tobytes()) for part in ([3, 4], [101, 102])]


def test_a_send_that_fails_is_the_error_of_the_operation_and_nothing_follows_it() -> None:
    posts = Posts(4, lost=2)
    with pytest.raises(PeerLostError) as raised:
        scatter(posts, LateClock()).advance()
    assert raised.value.rank == 12
    assert [peer for peer, _ in posts.sent] == [1]


def test_nobody_is_waited_for_once_a_send_has_failed() -> None:
    posts = Posts(3, lost=1)
    call = Call(Operation.ALL_GATHER, (spec(2),))
    with pytest.raises(PeerLostError):
        started(posts, LateClock(late=False), call, ring.all_gather(0, 3), [np.zeros(2, np.float32)]).advance()
    assert posts.received == []


def test_sends_that_take_too_long_are_a_timeout_that_names_their_peers() -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"after 5 s, scatter.*waits for ranks \[11\]"):
        scatter(Posts(2), LateClock(stuck=True)).advance()


def test_receives_share_the_operations_time_and_wait_a_moment_at_a_time() -> None:
    posts, clock = Posts(4), LateClock()

    def nothing_comes() -> None:
        clock.advance(posts.timeouts[-1] or 0.0)
        if len(posts.timeouts) % 8:
            raise TimeoutError

    posts.on_recv = nothing_comes
    call = Call(Operation.GATHER, (spec(2),), root=0)
    with pytest.raises(CollectiveTimeoutError, match=r"after 5 s, gather.*waits for ranks \[13\]") as raised:
        started(posts, clock, call, direct.gather(0, 4, 0), [np.zeros(2, np.float32)]).advance()
    assert posts.received == [1] * 8 + [2] * 8 + [3] * 4
    assert posts.timeouts == [SLICE_SECONDS] * 20
    assert raised.value.waiting_on == [13]
    assert clock.now() == 5.0


def test_the_last_wait_of_a_receive_takes_what_is_left() -> None:
    posts, clock = Posts(2), LateClock()

    def nothing_comes() -> None:
        clock.advance(posts.timeouts[-1] or 0.0)
        raise TimeoutError

    posts.on_recv = nothing_comes
    clock.advance(0.1)
    call = Call(Operation.GATHER, (spec(2),), root=0)
    execution = started(posts, clock, call, direct.gather(0, 2, 0), [np.zeros(2, np.float32)])
    clock.advance(4.65)
    with pytest.raises(CollectiveTimeoutError):
        execution.advance()
    assert posts.timeouts == [SLICE_SECONDS, pytest.approx(0.1)]


def test_who_is_waited_for_is_named_by_world_rank() -> None:
    call = Call(Operation.GATHER, (spec(2),), root=0)
    execution = started(Posts(3), LateClock(), call, direct.gather(0, 3, 0), [np.zeros(2, np.float32)])
    assert execution.waiting_on() == [11, 12]
    assert "ranks [11, 12]" in str(execution.timeout_error())


def test_every_message_has_a_tag_of_its_own_beyond_those_of_users() -> None:
    keys = [(Key(0, stream, number), slot) for stream in (0, 1, 2) for number in (1, 2, 1 << 20) for slot in (0, 1, 0xFFFF)]
    tags = {message_tag(key, slot) for key, slot in keys}
    assert len(tags) == len(keys)
    assert min(tags) > TAG_MAX
