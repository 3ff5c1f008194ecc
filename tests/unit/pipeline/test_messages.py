"""Messages between stages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.errors import CodecError, GroupClosedError, TensorMismatchError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.messages import Envelope, pack, parse
from ferrorpc.pipeline.transfers import Transfer, TransferKind
from ferrorpc.work import Work

ENVELOPE = Envelope("1f1b", 7, "2SEND_F3")


def round_trip(value):
    message = parse(pack(ENVELOPE, value))
    assert message.envelope == ENVELOPE
    return message.value(message.payload, NUMPY)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.zeros((0, 5), np.int64),
        np.array(2.5),
        np.arange(10, dtype=np.complex128)[::3],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
    ],
)
def test_an_array_arrives_as_it_was(value: np.ndarray):
    found = round_trip(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(found, value)
    assert found.flags.writeable


def test_none_and_tuples_arrive_as_they_were():
    assert round_trip(None) is None
    first, nothing, second = round_trip((np.arange(3), None, np.arange(4.0)))
    np.testing.assert_array_equal(first, np.arange(3))
    assert nothing is None
    np.testing.assert_array_equal(second, np.arange(4.0))
    assert round_trip((np.arange(2),))[0].tolist() == [0, 1]
    last, nothing = round_trip((np.arange(3, dtype=np.int8), None))
    assert (last.tolist(), nothing) == ([0, 1, 2], None)
    assert round_trip(()) == ()


def test_a_message_is_a_copy():
    x = np.zeros(100)
    message = pack(ENVELOPE, x)
    x += 1
    assert not parse(message).value(message, NUMPY).any()


def test_arrays_are_aligned():
    message = pack(ENVELOPE, (np.ones(3, np.uint8), np.ones(5)))
    _, second = parse(message).value(message, NUMPY)
    assert (second.ctypes.data - message.ctypes.data) % 64 == 0


@pytest.mark.parametrize("change", [lambda m: m[:-1], lambda m: m[:2], lambda m: np.zeros(50, np.uint8)])
def test_other_bytes_are_refused(change):
    with pytest.raises(CodecError, match="a message between stages of"):
        parse(change(pack(ENVELOPE, np.arange(5))))


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [(np.array(["text"]), TensorMismatchError, "dtype <U4"), ((np.ones(2), [3.0]), UsageError, "list is no array")],
)
def test_what_cannot_be_sent_is_refused_with_where_it_was_to_go(value, kind, message: str):
    with pytest.raises(kind, match=f"the value of {ENVELOPE.transfer}: {message}"):
        pack(ENVELOPE, value)


@pytest.mark.parametrize("late", [False, True])
def test_a_send_that_failed_at_once_is_told_of_like_one_that_fails_later(late: bool) -> None:
    work: Work[None] = Work(SYSTEM_CLOCK, "send")
    group: Any = SimpleNamespace(session=None, rank=0, world_ranks=(0, 1), send=lambda *arguments, **more: work)
    exchange = Exchange(group, [0, 1], [], "gpipe", 1, 5.0, {}, {})
    ends: list[Callable[[], object]] = [
        lambda: exchange.send(Transfer(0, 1, TransferKind.FORWARD, 0), np.ones(3)),
        lambda: work.fail(GroupClosedError("rank 1 has closed this subgroup")),
    ]
    for end in ends if late else reversed(ends):
        end()
    with pytest.raises(GroupClosedError, match="rank 1 has closed"):
        exchange.finish()
