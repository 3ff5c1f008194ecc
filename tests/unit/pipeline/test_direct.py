"""What comes from another GPU is received in the order in which it is sent, whatever is needed first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.errors import CodecError
from ferrorpc.pipeline.direct import Incoming, lanes_of
from ferrorpc.pipeline.messages import Letter, Message, pack, pack_apart, read, unpack
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.pipeline.wire import Sort, Wire, departures, ways
from ferrorpc.testing import run_world

WIRES = [Wire(0, 1, Sort.FORWARD, number) for number in range(4)]


class Lane:
    """Keeps what was asked of it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def broadcast(self, x: Any, root: int, *, out: np.ndarray, async_op: bool, timeout: float) -> str:
        assert (x, root, async_op) == (None, 0, True)
        self.sizes.append(out.size)
        return f"work {len(self.sizes)}"


def apart(number: int) -> Message:
    """A message whose arrays, of so many bytes, come by another way; without any, they are in it."""
    whole = read(pack(Letter("p", 0, str(number)), np.zeros(number, np.uint8)))
    return whole._replace(data=None) if number else whole


def test_everything_up_to_what_is_needed_is_begun_in_the_order_in_which_it_is_sent() -> None:
    lane, asked = Lane(), []

    def read_one(wire: Wire) -> Message:
        asked.append(wire.number)
        return apart(wire.number)

    incoming = Incoming(lane, WIRES)  # type: ignore[arg-type]
    message, work = incoming.reach(WIRES[2], NUMPY, read_one)
    assert (asked, lane.sizes, work) == ([0, 1, 2], [1, 2], "work 2")
    assert message.data is None
    message, work = incoming.reach(WIRES[0], NUMPY, read_one)
    assert work is None, "it was in its message"
    assert message.value(message.data, NUMPY).size == 0
    assert incoming.reach(WIRES[1], NUMPY, read_one)[1] == "work 1"
    assert incoming.reach(WIRES[3], NUMPY, read_one)[1] == "work 3"
    assert asked == [0, 1, 2, 3]


def test_a_message_without_its_arrays_is_refused_where_nothing_else_comes() -> None:
    whole = pack(Letter("p", 1, "0SEND_F0"), np.zeros(3))
    with pytest.raises(CodecError, match="0SEND_F0, lacks its 24 bytes"):
        unpack(whole[24:], NUMPY)


@pytest.mark.parametrize("value", [None, np.zeros(3), (np.zeros(3), None), np.zeros(0), ()])
def test_what_is_not_on_a_gpu_stays_in_its_message(value: Any) -> None:
    letter = Letter("p", 1, "0SEND_F0")
    message, arrays = pack_apart(letter, value)
    assert arrays is None
    assert len(message) == len(pack(letter, value))
    found = read(message)
    assert found.letter == letter
    np.testing.assert_equal(found.value(found.data, NUMPY), value)


def test_a_rank_knows_in_which_order_another_sends() -> None:
    schedule = schedules.dualpipe_v(2, 4).with_messages()
    rows, placement, edges = schedule.actions, schedule.placement, schedule.edges
    sent = departures(rows[0], placement, edges, 1)
    assert {(wire.source, wire.sort) for wire in sent} == {(0, Sort.FORWARD), (3, Sort.BACKWARD)}
    assert sorted(set(sent)) == sorted(sent)
    sends = [each for each in rows[0] if each.kind.sends]
    assert [str(wire) for wire in sent] == [str(each) for each in sends]
    assert departures(rows[0], placement, edges, 0) == []


def test_arrays_go_both_ways_along_every_edge_between_two_ranks() -> None:
    assert ways([0, 1, 2], Edges(3)) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert ways([0, 1, 1, 0], Edges(4)) == {(0, 1), (1, 0)}
    assert ways([0, 0], Edges(2)) == set()


def test_where_the_backend_moves_nothing_between_gpus_there_are_no_lanes() -> None:
    def body(group: Any) -> Any:
        return lanes_of(group, {(0, 1)}, [SimpleNamespace(on_device=True)])  # type: ignore[list-item]

    assert run_world(2, body) == [{}, {}]
