"""What a running plan sends is what its arrays hold when it is sent, encoded once where several take the same."""

from __future__ import annotations

import numpy as np

from ferrorpc.collectives.algorithms.plan import Buffer, Plan, Receive, Region, Send
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.codecs import codec


def test_what_was_written_since_it_was_encoded_is_encoded_again() -> None:
    part = Region(Buffer.OUT, 0, 0, 4)
    come = Receive(1, 0, Region(Buffer.OUT, 0, 2, 3))
    plan = Plan((Send(1, 1, part), Send(2, 1, part), come, Send(1, 2, part), Send(2, 2, part)))
    call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (4,)),), ReduceOp.SUM, wire="bf16")
    x = np.ones(4, np.float32)
    workspace = Workspace(Rules(call, plan, plan.actions, 0, 3), [x], [x])
    before = [workspace.encoded(index, 0, 4) for index in (0, 1)]
    workspace.accept(come, 0, np.array([7], np.float32))
    after = [workspace.encoded(index, 0, 4) for index in (3, 4)]
    assert before[0] is before[1]
    assert after[0] is after[1]
    assert [codec("bf16").decode(each[0], 4).tolist() for each in (before, after)] == [[1, 1, 1, 1], [1, 1, 7, 1]]


def test_halves_are_widened_where_they_are_added_up() -> None:
    """bfloat16 is kept as its bits, which as numbers would be others."""
    come = Receive(1, 0, Region(Buffer.WORK, 0, 0, 2))
    plan = Plan((come, Send(1, 1, come.region)), (2,))
    call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.BFLOAT16, (2,)),), ReduceOp.SUM)
    workspace = Workspace(Rules(call, plan, plan.actions, 0, 2), [np.zeros(2, np.uint16)], None)
    workspace.accept(come, 0, np.array([0x3F80, 0x4000], np.uint16))
    assert workspace.outgoing(come.region)[1].tolist() == [1.0, 2.0]
