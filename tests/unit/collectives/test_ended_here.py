"""What a rank has found to end its generation keeps its operations from completing before the first cause is known."""

from collections.abc import Callable

import pytest

from ferrorpc.errors import CollectiveMismatchError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from tests.contract.queues import queue_backends
from tests.unit.collectives.test_progress import Scripted, both, run

FOUND = CollectiveMismatchError({0: "gather()", 1: "scatter()"})


def told_later() -> Latch:
    """Its first cause comes some time after the first report, and is another."""
    first = GroupAbortedError(1, "the first cause")
    return Latch(lambda cause, latch: SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.02, lambda: latch.trip(first) and None))


@both
@pytest.mark.parametrize("of", [lambda latch: latch, lambda latch: latch.part()[0]], ids=["its own", "a subgroup's"])
def test_no_operation_completes_after_that(way: str, of: Callable[[Latch], Latch]) -> None:
    latch = told_later()
    execution = Scripted(of(latch))
    latch.end(FOUND)
    with pytest.raises(GroupAbortedError, match="the first cause"):
        run(way, execution)
    assert execution.finished == 1


@both
def test_nor_does_one_in_flight(way: str) -> None:
    class Last(Scripted):
        """What it waited for comes right after what ends the generation, on the same stream."""

        def advance(self) -> bool:
            over = super().advance()
            if over:
                latch.end(FOUND)
            return over

    latch = told_later()
    with pytest.raises(GroupAbortedError, match="the first cause"):
        run(way, Last(latch, steps=2))


def test_nor_does_one_begin() -> None:
    backend, sent = queue_backends(2)[0], list[object]()
    backend.latch, backend.send = told_later(), lambda *arguments: sent.append(arguments)  # type: ignore[method-assign]
    group = ProcessGroup(backend, timeout=5.0)
    backend.latch.end(FOUND)
    with pytest.raises(GroupAbortedError, match="the first cause"):
        group.send(1.0, 1)
    assert sent == []


def test_the_first_of_several_findings_is_kept() -> None:
    latch = told_later()
    for found in (FOUND, GroupAbortedError(0, "a second one")):
        latch.end(found)
    assert [str(found) for found in latch.ended_here] == [str(FOUND)]
