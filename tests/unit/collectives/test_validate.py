"""The validator sees what is wrong with a plan, whatever it is, and says so."""

from __future__ import annotations

import pytest

from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Finish, Fold, FoldOwn, Load, Plan, Receive, Region, Send
from ferrorpc.collectives.algorithms.validate import findings
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.types import DType, ReduceOp, TensorSpec

CALL = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (4,)),), ReduceOp.SUM)
IN, WORK, OUT = (Region(buffer, 0, 0, 4) for buffer in (Buffer.IN, Buffer.WORK, Buffer.OUT))
FIRST: tuple[Action, ...] = (Send(1, 0, IN), Load(IN, WORK), Fold(1, 0, WORK), Finish(WORK, OUT))
SECOND: tuple[Action, ...] = (Send(0, 0, IN), Receive(0, 0, WORK), FoldOwn(IN, WORK), Finish(WORK, OUT))


def part(buffer: Buffer, start: int, stop: int, item: int = 0) -> Region:
    return Region(buffer, item, start, stop)


def found(first: tuple[Action, ...], second: tuple[Action, ...] = SECOND, out_items: int = 1) -> list[str]:
    plans = [Plan(first, (4,), out_items), Plan(second, (4,))]
    return findings([CALL, CALL], plans, rank_order=True)


def test_a_sound_plan_has_no_findings() -> None:
    assert found(FIRST) == []


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ((Send(1, 0, OUT), *FIRST[1:]), "out0[0:4] is used before it exists"),
        ((Send(1, 0, part(Buffer.IN, 0, 5)), *FIRST[1:]), "in0[0:5] ends behind its array"),
        ((FIRST[0], Receive(1, 0, IN)), "in0[0:4] is written, which belongs to the caller"),
        ((FIRST[0], Load(IN, part(Buffer.WORK, 0, 3))), "work0[0:3] gets 4 elements"),
        ((FIRST[0], Load(part(Buffer.IN, 0, 2), part(Buffer.WORK, 3, 5))), "work0[3:5] ends behind its array"),
        ((FIRST[0], Load(IN, part(Buffer.WORK, 0, 4, item=1))), "work1[0:4] has no room"),
        ((Send(0, 0, IN),), "it sends to rank 0"),
        ((Send(2, 0, IN),), "it sends to rank 2"),
        ((Send(-1, 0, IN),), "it sends to rank -1"),
        ((*FIRST[:3], Copy(WORK, OUT)), "was never finished"),
        ((*FIRST[:3], Finish(part(Buffer.WORK, 0, 2), part(Buffer.OUT, 0, 2))), "result 0 has 2 elements, not 4"),
        (
            (
                *FIRST[:3],
                Finish(part(Buffer.WORK, 0, 2), part(Buffer.OUT, 2, 4)),
                Finish(part(Buffer.WORK, 2, 4), part(Buffer.OUT, 0, 2)),
            ),
            "was element 2 of array 0",
        ),
        (
            (FIRST[0], *FIRST[1:2], Load(part(Buffer.IN, 2, 4), part(Buffer.WORK, 0, 2)), *FIRST[2:]),
            "of element 2 is folded with",
        ),
        ((FIRST[1], Finish(WORK, OUT), Send(1, 0, OUT), Fold(1, 0, WORK), Finish(WORK, OUT)), "after it was finished"),
    ],
)
def test_what_is_wrong_is_said(first: tuple[Action, ...], text: str) -> None:
    assert any(text in finding for finding in found(first))


def test_a_result_too_many_is_seen() -> None:
    assert any("rank 0 has 2 results, not 1" in finding for finding in found(FIRST, out_items=2))


def test_a_barrier_that_somebody_leaves_without_word_of_the_others_is_seen() -> None:
    nothing = part(Buffer.IN, 0, 0)
    plans = [Plan((Send(1, 0, nothing),), (), 0), Plan((Receive(0, 0, part(Buffer.OUT, 0, 0)),), (), 0)]
    assert findings([Call(Operation.BARRIER)] * 2, plans) == ["rank 0 leaves without word of [1]"]
