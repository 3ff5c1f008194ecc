"""A rank that is late, or has left: what one rank finds is the first cause, on all ranks from then on, and says who it is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, PeerLostError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from tests.unit.pipeline.stages import WIDTH, Layer, batch, half_square


@pytest.mark.parametrize("late", [0, 3])
def test_one_rank_raises_the_timeout_and_all_others_name_it(late: int) -> None:
    """All wait in turn for the late one, with deadlines that pass at nearly the same time."""

    def body(group: Any) -> list[FerroError]:
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        group.barrier()
        if group.rank == late:
            group.session.clock.parker().park(20.0)
        told = []
        for call in (lambda: pipe.step(*batch(8), half_square, timeout=7.0), group.barrier):
            with pytest.raises(FerroError) as caught:
                call()
            told.append(caught.value)
        return told

    everyones = run_world(4, body, timeout=100.0)
    (own,) = [rank for rank, errors in enumerate(everyones) if isinstance(errors[0], CollectiveTimeoutError)]
    for rank, errors in enumerate(everyones):
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError if rank == own else GroupAbortedError)
            assert "waited 7 s for" in error.message
            assert rank == own or error.fields["rank"] == own


class StuckForward(Layer):
    """A layer whose second forward pass takes long on the first rank."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank)
        self._group = group
        self._forwards = 0

    def forward(self, x: Any) -> Any:
        self._forwards += 1
        if self._group.rank == 0 and self._forwards == 2:
            self._group.session.clock.parker().park(self._group.session.clock.now() + 20.0)
        return super().forward(x)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_first_says_what_every_rank_is_in_so_the_one_that_waits_for_nobody_is_seen(seed: int) -> None:
    """All later stages wait in a chain, and any of them may be the first whose deadline passes."""

    def body(group: Any) -> str:
        pipe = Pipeline(StuckForward(group), group, "1f1b", 4)
        with pytest.raises(FerroError) as caught:
            pipe.step(*batch(8), half_square, timeout=7.0)
        return caught.value.message

    for told in run_world(4, body, seed=seed, timeout=100.0):
        assert re.search("rank 0 [^;]*, last seen in 0F1;", told)
        for rank in 1, 2, 3:
            last = rf"last seen in recv\({rank - 1}SEND_F[01] of rank {rank - 1}\)"
            assert re.search(rf"rank {rank} [^;]*, {last}", told)


def test_a_rank_is_shown_in_what_it_sent_last_by_the_name_that_the_schedule_has_for_it() -> None:
    """Such as one that is busy elsewhere between two steps: its message's tag would tell a user nothing."""

    def body(group: Any) -> str:
        Pipeline(Layer(group.rank), group, "gpipe", 4).step(*batch(8), half_square)
        return group.session.activity.last

    assert run_world(2, body) == ["0B3", "1SEND_B3"]


def test_outputs_that_the_next_stage_never_takes_are_a_timeout_that_names_it() -> None:
    """The output is more than is sent without credit, so the send is not complete before the receiver expects it."""

    def body(group: Any) -> None:
        pipe = Pipeline(Layer(group.rank), group, "gpipe", 1)
        if group.rank == 1:
            group.recv(0, tag=5)
        pipe.forward(np.ones((200_000, WIDTH)), timeout=7.0)

    first, _ = run_world(2, body, return_exceptions=True, timeout=100.0)
    assert isinstance(first, CollectiveTimeoutError)
    assert first.waiting_on == [1]
    assert "waited 7 s for rank 1 to take" in first.message


def test_a_pass_may_wait_longer_than_its_group_does() -> None:
    """For its sends, too: the output is more than is sent without credit."""

    def body(group: Any) -> Any:
        pipe = Pipeline(Layer(group.rank), group, "gpipe", 1)
        if group.rank == 1:
            group.session.clock.parker().park(20.0)
        return pipe.forward(np.ones((200_000, WIDTH)), timeout=60.0)

    _, outputs = run_world(2, body, timeout=5.0)
    assert len(outputs) == 200_000


def test_a_stage_that_never_comes_is_a_timeout_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Any) -> None:
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        if group.rank == 1:
            group.recv(0, tag=5)
        pipe.step(*batch(8), half_square, timeout=7.0)

    first, second = run_world(2, body, return_exceptions=True, timeout=100.0)
    assert isinstance(first, CollectiveTimeoutError)
    assert first.waiting_on == [1]
    assert "waited 7 s for 1SEND_B0 of rank 1" in str(first)
    assert "after 5 s, this rank waits for 1SEND_B0 of rank 1" in caplog.text
    assert isinstance(second, GroupAbortedError)


def test_a_stage_that_has_left_is_named_to_those_that_wait_for_others() -> None:
    """Only the second stage waits for it, and the third one for the second."""

    def body(group: Any) -> None:
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        if group.rank == 0:
            group.close()
            return
        for call in (lambda: pipe.step(*batch(8), half_square), group.barrier):
            with pytest.raises(PeerLostError) as caught:
                call()
            assert caught.value.rank == 0

    run_world(3, body)
