"""Hooks of somebody else's: what is wrong with one is said where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.errors import UsageError
from ferrorpc.hooks import BucketCollectives, ErrorFeedback, Exchange, Hook, Part, PowerSGD
from ferrorpc.testing import run_world


class Own(Hook):
    remembers = False
    text = "own"


class WithoutYield(Own):
    def exchange(self, part: Part, collectives: BucketCollectives) -> Any:
        collectives.all_reduce(part.values).wait()


class ReturnsItsWork(Own):
    def exchange(self, part: Part, collectives: BucketCollectives) -> Any:
        return collectives.all_reduce(part.values)


class DeliversNothing(Own):
    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        yield collectives.all_reduce(part.values)


class DeliversTooMuch(Own):
    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        delivered = np.append(part.values, 0)
        yield collectives.all_reduce(part.values)
        return delivered


def means(make: Callable[[], Hook]) -> list[list[float]]:
    """What the synchronisers of 2 ranks give with such hooks, of 1 and 2."""

    def body(group: ferrorpc.ProcessGroup) -> list[float]:
        sync = ferrorpc.GradientSynchronizer({"w": np.zeros((1, 2), np.float32)}, group, hook=make())
        return sync({"w": np.full((1, 2), group.rank + 1, np.float32)})["w"].ravel().tolist()

    return run_world(2, body)


@pytest.mark.parametrize("around", [lambda hook: hook, ErrorFeedback, lambda hook: PowerSGD(1, hook)])
@pytest.mark.parametrize(("kind", "returned"), [(WithoutYield, "None"), (ReturnsItsWork, "Work")])
def test_an_exchange_that_is_no_generator_is_refused_with_its_hooks_name(around: Any, kind: type[Hook], returned: str) -> None:
    with pytest.raises(UsageError, match=f"the exchange of <{kind.__name__}: own> is no generator.*{returned}") as raised:
        means(lambda: around(kind()))
    assert "yield each collective" in raised.value.hint


@pytest.mark.parametrize("around", [ErrorFeedback, lambda hook: ErrorFeedback(PowerSGD(1, hook))])
@pytest.mark.parametrize(("kind", "returned"), [(DeliversNothing, "None"), (DeliversTooMuch, r"shape \(3,\)")])
def test_who_does_not_say_what_was_delivered_is_refused_where_that_is_wanted(
    around: Any, kind: type[Hook], returned: str
) -> None:
    with pytest.raises(UsageError, match=f"the exchange of <{kind.__name__}: own> returned.*{returned}") as raised:
        means(lambda: around(kind()))
    assert "wants_delivered" in raised.value.hint


def test_what_was_delivered_is_not_asked_for_where_nobody_wants_it() -> None:
    assert means(DeliversNothing) == [[1.5, 1.5]] * 2
