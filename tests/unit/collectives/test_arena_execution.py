"""A shared-memory operation as its driver has it: who is waited for, what it says of them, and what it leaves when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrorpc.collectives.arena.all_reduce import _TwoShotRun
from ferrorpc.collectives.arena.arena import PROGRAM_CHANNELS
from ferrorpc.collectives.arena.control_blocks import CHUNK_BITS, STAGED
from ferrorpc.collectives.arena.select import prepare
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import BarrierTimeoutError, CollectiveMismatchError, CollectiveTimeoutError
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.transports.mailbox import FINISHED, SAME, Mailbox
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key
from tests.unit.collectives.shared_world import SharedWorld, own

BARRIER = Call(Operation.BARRIER)


class Wire:
    """Lanes on which nobody answers."""

    def __init__(self, rank: int) -> None:
        self.mailbox = Mailbox(rank, lambda error: None)
        self.probed: list[int] = []
        self.lost_links: dict[int, str] = {}

    def lost(self) -> dict[int, str]:
        return self.lost_links

    def unreached(self) -> dict[int, str]:
        return {}

    def probe(self, peer: int, key: Key, signature: str) -> None:
        self.probed.append(peer)


@pytest.fixture
def size() -> int:
    return 3


@pytest.fixture
def world(size: int) -> Iterator[SharedWorld]:
    with SharedWorld(size) as world:
        for rank, arena in enumerate(world.arenas):
            arena.transport = Wire(rank)
        yield world


class Stopped(Exception):
    """A rank goes no further."""


def start(
    world: SharedWorld, rank: int, call: Call, number: int, *inputs: np.ndarray, output: np.ndarray | None = None
) -> Execution:
    prepared = prepare(world.arenas[rank], call)
    assert prepared is not None
    outputs = None if output is None else [output]
    execution = prepared.start(Key(0, 0, number), inputs, outputs, Guard(SYSTEM_CLOCK, Latch(), 5.0))
    execution.wake = lambda: None
    return execution


def complete(executions: list[Execution]) -> None:
    left = list(executions)
    for _ in range(100):
        left = [execution for execution in left if not execution.advance()]
    assert not left
    for execution in executions:
        execution.finish()


def all_reduce(op: ReduceOp) -> Call:
    return Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (4,)),), op)


def test_who_is_not_there_is_named_with_the_operation_it_entered_last(world: SharedWorld) -> None:
    complete([start(world, rank, BARRIER, 1) for rank in range(3)])
    here = [start(world, rank, all_reduce(ReduceOp.SUM), 2, np.ones(4, np.float32)) for rank in range(2)]
    for execution in here:
        assert not execution.advance()
    assert here[0].waiting_on() == [2]
    assert here[0].explain().endswith(" #2 waits for rank 2 (not there yet: last entered barrier() #1)")
    timeout = here[0].timeout_error()
    assert isinstance(timeout, CollectiveTimeoutError)
    assert timeout.waiting_on == [2]


def test_who_has_never_been_anywhere_is_missing_at_a_barrier(world: SharedWorld) -> None:
    first = start(world, 0, BARRIER, 1)
    assert not first.advance()
    assert first.waiting_on() == [1, 2]
    assert first.explain().endswith(
        "waits for rank 1 (not there yet: has entered nothing of this group), "
        "rank 2 (not there yet: has entered nothing of this group)"
    )
    assert isinstance(first.timeout_error(), BarrierTimeoutError)


def test_who_is_in_the_first_operation_of_a_stream_is_not_said_to_be_missing(world: SharedWorld) -> None:
    here = [start(world, rank, all_reduce(ReduceOp.SUM), 1, np.ones(4, np.float32)) for rank in (0, 2)]
    for execution in here:
        assert not execution.advance()
        assert execution.waiting_on() == [1]
    assert here[0].explain().endswith(" #1 waits for rank 1 (not there yet: has entered nothing of this group)")
    world.arenas[0].transport.lost_links[2] = PEER_LEFT
    assert here[0].waiting_on() == [1, 2]


LARGE = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (200,)),), ReduceOp.SUM)
"""In four of the small chunks."""


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize(
    ("in_place", "stopped_in"),
    [(ranks, step) for ranks in ((), (0,)) for step in ("stage", "reduce", "copy")]
    + [((0, 1, 2, 3), step) for step in ("reduce", "copy")],
)
@pytest.mark.parametrize("chunk", range(4))
def test_who_is_stopped_within_a_large_all_reduce_is_waited_for(
    world: SharedWorld, monkeypatch: pytest.MonkeyPatch, in_place: tuple[int, ...], stopped_in: str, chunk: int
) -> None:
    def stopped(run: _TwoShotRun, number: int) -> Any:
        if run._rank == 2 and number == chunk:
            raise Stopped
        return step(run, number)

    step = getattr(_TwoShotRun, stopped_in)
    monkeypatch.setattr(_TwoShotRun, stopped_in, stopped)
    ones = np.ones(200, np.float32)
    arrays = [own(world, rank, ones) if rank in in_place else ones.copy() for rank in range(4)]
    parts = [start(world, rank, LARGE, 1, array, output=array) for rank, array in enumerate(arrays)]
    left = dict(enumerate(parts))
    for _ in range(100):
        for rank, part in list(left.items()):
            try:
                if part.advance():
                    del left[rank]
            except Stopped:
                del left[rank]
    assert all(part.waiting_on() == [2] for part in left.values())
    assert left or (stopped_in, chunk) == ("copy", 3), "in the last chunk nobody needs what it copies to memory of its own"


@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize(
    ("ahead", "waited"),
    [((0, 0, 0), [1, 2, 3]), ((1, 0, 0), [2, 3]), ((1, 0, -1), [3]), ((1, 1, 1), [1, 2, 3])],
    ids=["alike", "others are ahead", "behind this rank", "all are ahead"],
)
def test_who_is_behind_is_waited_for(world: SharedWorld, ahead: tuple[int, ...], waited: list[int]) -> None:
    parts = [start(world, rank, all_reduce(ReduceOp.SUM), 1, np.ones(4, np.float32)) for rank in range(4)]
    assert not parts[0].advance()
    blocks = [arena.bank(0).channels[1].block for arena in world.arenas]
    for block, more in zip(blocks[1:], ahead, strict=True):
        block[STAGED] = blocks[0][STAGED] + more
    assert parts[0].waiting_on() == waited
    assert parts[0].explain().count("(is in it too)") == len(waited)


def test_who_has_ended_is_waited_for_whatever_it_wrote_last(world: SharedWorld) -> None:
    parts = [start(world, rank, all_reduce(ReduceOp.SUM), 1, np.ones(4, np.float32)) for rank in range(3)]
    assert not parts[0].advance()
    blocks = [arena.bank(0).channels[1].block for arena in world.arenas]
    for block in blocks[1:]:
        block[STAGED] = blocks[0][STAGED]
    world.arenas[0].transport.lost_links[2] = "its process ended without a goodbye"
    assert parts[0].waiting_on() == [2]
    assert parts[0].explain().endswith("waits for rank 2 (its link was lost: its process ended without a goodbye)")
    world.arenas[0].transport.lost_links[2] = PEER_LEFT
    assert parts[0].explain().endswith("waits for rank 2 (it said goodbye)")
    blocks[1][STAGED] -= 1
    assert parts[0].waiting_on() == [1, 2]


@pytest.mark.parametrize("gone", [1, 2])
def test_what_gives_up_leaves_word_that_its_arrays_may_have_changed(world: SharedWorld, gone: int) -> None:
    parts = [start(world, rank, all_reduce(ReduceOp.SUM), 1, np.ones(4, np.float32)) for rank in range(3)]
    for rank in (0, gone):
        assert not parts[rank].advance()
    parts[gone].finish()
    left = [part for rank, part in enumerate(parts) if rank != gone]
    assert not any(part.advance() for _ in range(50) for part in left)
    assert gone in parts[0].waiting_on()


def test_a_mismatch_names_a_rank_that_has_given_up_over_it_already(world: SharedWorld) -> None:
    ops = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN]
    parts = [start(world, rank, all_reduce(op), 1, np.ones(4, np.float32)) for rank, op in enumerate(ops)]
    assert not parts[0].advance()
    with pytest.raises(CollectiveMismatchError):
        parts[1].advance()
    parts[1].finish()
    with pytest.raises(CollectiveMismatchError) as raised:
        parts[2].advance()
    assert raised.value.signatures == {rank: all_reduce(op).signature for rank, op in enumerate(ops)}


def test_who_is_waited_for_is_asked_over_the_lanes_and_can_ask_back_until_it_is_over(world: SharedWorld) -> None:
    first = start(world, 0, BARRIER, 1)
    assert not first.advance()
    wire = world.arenas[0].transport
    first.probe()
    assert wire.probed == [1, 2]
    assert wire.mailbox.standing(1, Key(0, 0, 1), BARRIER.signature).standing == SAME
    first.finish()
    assert wire.mailbox.standing(1, Key(0, 0, 1), BARRIER.signature).standing == FINISHED


def test_a_rank_that_is_asked_tells_which_call_has_that_place_and_which_was_its_last(world: SharedWorld) -> None:
    arena = world.arenas[0]
    assert arena.entered(Key(0, 0, 1)) == (None, 0, "")
    complete([start(world, rank, BARRIER, 1) for rank in range(3)])
    assert not start(world, 0, all_reduce(ReduceOp.SUM), 2, np.ones(4, np.float32)).advance()
    last = all_reduce(ReduceOp.SUM).signature
    assert arena.entered(Key(0, 0, 1)) == ("barrier()", 2, last)
    assert arena.entered(Key(0, 0, 2)) == (last, 2, last)
    assert arena.entered(Key(0, 0, 3)) == (None, 2, last)
    assert arena.bank(0).channels[2].block[STAGED] >> CHUNK_BITS == 3


def test_a_call_is_not_mistaken_for_the_next_one_on_its_channel(world: SharedWorld) -> None:
    """That publishes its signature before it says which operation it is."""
    complete([start(world, rank, BARRIER, 1) for rank in range(3)])
    arena, number = world.arenas[1], 1 + PROGRAM_CHANNELS
    call = prepare(arena, Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (4,)),), ReduceOp.SUM))
    assert call is not None
    channel, _, base = call.claim(arena.bank(0), number)
    assert arena.entered(Key(0, 0, 1)).signature == "barrier()"
    call.publish_signature(channel, base)
    assert arena.entered(Key(0, 0, 1)).signature is None
