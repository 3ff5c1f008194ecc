"""Arrays from another GPU are received in the order in which they are sent, whichever is needed first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.errors import CodecError
from ferrorpc.pipeline.device_lanes import LaneReceiver, open_lanes
from ferrorpc.pipeline.messages import Envelope, Message, pack, pack_split, parse
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.pipeline.transfers import Transfer, TransferKind, links_of, sends_to
from ferrorpc.testing import run_world

TRANSFERS = [Transfer(0, 1, TransferKind.FORWARD, number) for number in range(4)]


class Lane:
    """Records the sizes that it was asked to receive."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def broadcast(self, x: Any, root: int, *, out: np.ndarray, async_op: bool, timeout: float) -> str:
        assert (x, root, async_op, timeout) == (None, 0, True, 2.0)
        self.sizes.append(out.size)
        return f"work {len(self.sizes)}"


def apart(number: int) -> Message:
    """A message whose arrays, of so many bytes, are sent separately; or contained in it, if there are none."""
    whole = parse(pack(Envelope("p", 0, str(number)), np.zeros(number, np.uint8)))
    return whole._replace(data=None) if number else whole


def test_everything_up_to_what_is_needed_is_begun_in_the_order_in_which_it_is_sent() -> None:
    lane, asked = Lane(), []

    def read_one(transfer: Transfer) -> Message:
        asked.append(transfer.number)
        return apart(transfer.number)

    receiver = LaneReceiver(lane, TRANSFERS)  # type: ignore[arg-type]
    message, work = receiver.begin(TRANSFERS[2], NUMPY, read_one, 2.0)
    assert (asked, lane.sizes, work) == ([0, 1, 2], [1, 2], "work 2")
    assert message.data is None
    message, work = receiver.begin(TRANSFERS[0], NUMPY, read_one, 2.0)
    assert work is None, "it was in its message"
    assert message.value(message.data, NUMPY).size == 0
    assert receiver.begin(TRANSFERS[1], NUMPY, read_one, 2.0)[1] == "work 1"
    assert receiver.begin(TRANSFERS[3], NUMPY, read_one, 2.0)[1] == "work 3"
    assert asked == [0, 1, 2, 3]


def test_a_message_without_its_arrays_is_refused_where_nothing_else_comes() -> None:
    whole = pack(Envelope("p", 1, "0SEND_F0"), np.zeros(3))
    with pytest.raises(CodecError, match="0SEND_F0, lacks its 24 bytes"):
        _ = parse(whole[24:]).payload


@pytest.mark.parametrize("value", [None, np.zeros(3), (np.zeros(3), None), np.zeros(0), ()])
def test_what_is_not_on_a_gpu_stays_in_its_message(value: Any) -> None:
    envelope = Envelope("p", 1, "0SEND_F0")
    message, arrays = pack_split(envelope, value)
    assert arrays is None
    assert len(message) == len(pack(envelope, value))
    found = parse(message)
    assert found.envelope == envelope
    np.testing.assert_equal(found.value(found.data, NUMPY), value)


def test_a_rank_knows_in_which_order_another_sends() -> None:
    schedule = schedules.dualpipe_v(2, 4).with_messages()
    rows, placement, edges = schedule.actions, schedule.placement, schedule.edges
    sent = sends_to(1, rows[0], placement, edges)
    assert {(transfer.source, transfer.kind) for transfer in sent} == {(0, TransferKind.FORWARD), (3, TransferKind.BACKWARD)}
    assert sorted(set(sent)) == sorted(sent)
    sends = [each for each in rows[0] if each.kind.sends]
    assert [str(transfer) for transfer in sent] == [str(each) for each in sends]
    assert sends_to(0, rows[0], placement, edges) == []


def test_arrays_go_both_ways_along_every_edge_between_two_ranks() -> None:
    assert links_of([0, 1, 2], Edges(3)) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert links_of([0, 1, 1, 0], Edges(4)) == {(0, 1), (1, 0)}
    assert links_of([0, 0], Edges(2)) == set()


def test_where_the_backend_moves_nothing_between_gpus_there_are_no_lanes() -> None:
    def body(group: Any) -> Any:
        return open_lanes(group, {(0, 1)}, [SimpleNamespace(on_device=True)])  # type: ignore[list-item]

    assert run_world(2, body) == [{}, {}]
