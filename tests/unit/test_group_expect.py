"""Messages whose place in the queue is taken before they are waited for, and sends that leave at once."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    InvalidRankError,
    SelfSendError,
    UsageError,
)
from ferrorpc.testing import run_world
from ferrorpc.transports.credit import EAGER_BYTES


def test_messages_come_in_the_order_in_which_they_were_expected():
    def body(group):
        if group.rank == 0:
            for number in range(3):
                group.send(np.array([number]), 1, tag=4)
            return None
        first, second = group.expect(0, 4), group.expect(0, 4)
        third = group.recv(0, 4).item()
        return second.take().item(), first.take().item(), third

    assert run_world(2, body)[1] == (1, 0, 2)


def test_the_time_a_message_may_take_begins_when_it_is_waited_for():
    def body(group):
        if group.rank == 0:
            group.session.clock.parker().park(130.0)
            group.send(7, 1)
            return None
        expected = group.expect(0)
        group.session.clock.parker().park(100.0)
        return expected.take(timeout=50.0).item()

    assert run_world(2, body)[1] == 7


def test_a_long_message_travels_before_it_is_waited_for():
    """Its sender has gone on when the receiver first looks: nobody waits for a grant."""
    long = np.arange(2 * EAGER_BYTES, dtype=np.uint8)

    def body(group):
        if group.rank == 0:
            group.send(long, 1)
            group.barrier()
            return None
        expected = group.expect(0)
        group.barrier()
        return expected.take(timeout=0.0)

    np.testing.assert_array_equal(run_world(2, body)[1], long)


def test_what_did_not_come_in_time_or_was_given_up_is_for_the_next_recv():
    def body(group):
        if group.rank == 0:
            group.barrier()
            group.send(np.ones(3), 1)
            group.send(np.zeros(2), 1)
            return None
        late, given_up = group.expect(0), group.expect(0)
        with pytest.raises(CollectiveTimeoutError):
            late.take(timeout=0.5)
        given_up.forget()
        group.barrier()
        return group.recv(0).tolist(), group.recv(0).tolist()

    assert run_world(2, body)[1] == ([1.0] * 3, [0.0] * 2)


def test_what_had_come_when_it_was_given_up_is_for_the_next_recv():
    def body(group):
        if group.rank == 0:
            group.send(np.ones(3), 1)
            group.barrier()
            return None
        given_up = group.expect(0)
        group.barrier()
        given_up.forget()
        return group.recv(0, timeout=1.0).tolist()

    assert run_world(2, body)[1] == [1.0] * 3


@pytest.mark.parametrize("how", ["take", "take in vain", "forget"])
def test_what_was_taken_or_given_up_cannot_be_taken(how: str) -> None:
    def body(group):
        if group.rank == 1:
            group.barrier()
            for number in range(2):
                group.send(number, 0)
            return None
        expected = group.expect(1)
        with pytest.raises(UsageError, match="timeout"):
            expected.take(timeout=-1.0)
        if how == "take in vain":
            with pytest.raises(CollectiveTimeoutError):
                expected.take(timeout=0.1)
        elif how == "forget":
            expected.forget()
        group.barrier()
        if how == "take":
            assert expected.take().item() == 0
        with pytest.raises(UsageError, match="recv\\(from rank 1, tag=0\\) was taken or given up already"):
            expected.take()
        return group.recv(1).item()

    assert run_world(2, body)[0] == (1 if how == "take" else 0)


def test_the_end_of_the_generation_is_raised_where_a_message_is_expected():
    def body(group):
        if group.rank == 0:
            group.abort("for a test")
            return None
        expected = group.expect(0)
        with pytest.raises(GroupAbortedError, match="for a test"):
            expected.take()
        return None

    run_world(2, body)


def test_what_cannot_be_expected_is_refused():
    def body(group):
        with pytest.raises(InvalidRankError):
            group.expect(2)
        with pytest.raises(SelfSendError):
            group.expect(group.rank)
        group.close()
        with pytest.raises(GroupClosedError):
            group.expect(1 - group.rank)

    run_world(2, body)


def test_a_send_that_the_lane_takes_is_done_when_it_returns_and_its_array_may_change():
    def body(group):
        if group.rank == 0:
            x = np.ones(1000)
            work = group.send(x, 1, async_op=True)
            assert work.done()
            assert work.wait() is None
            x[...] = 0
            beyond = group.send(np.zeros(2 * EAGER_BYTES, np.uint8), 1, async_op=True)
            assert not beyond.done(), "the receiver has not asked for the rest"
            beyond.wait()
            return None
        return group.recv(0).sum(), group.recv(0).size

    assert run_world(2, body)[1] == (1000.0, 2 * EAGER_BYTES)
