"""A rank that is late: one rank's deadline is the first cause, on every rank and from then on."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from tests.unit.pipeline.stages import Layer, batch, half_square


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
