"""Models that are not a chain."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.errors import CollectiveMismatchError, GroupAbortedError, UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.testing import FaultPlan, run_world
from tests.unit.pipeline.stages import Layer, batch, half_square

DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_model_is_a_chain_where_nobody_says_otherwise():
    assert Edges(3).pairs == ((0, 1), (1, 2))
    assert schedules.gpipe(3, 2).edges.pairs == ((0, 1), (1, 2))
    assert Edges(1).pairs == ()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (1, 2), (2, 1)], "no edge from piece 2 to piece 1"),
        ([(0, 1), (1, 3)], "no edge from piece 1 to piece 3 of a model of 3"),
        ([(0, 1), (0, 1), (1, 2)], "is there twice"),
        ([(0, 2)], "no edge leads to piece 1"),
        ([(0, 1), (0, 2)], "no edge leads on from piece 1"),
    ],
)
def test_edges_that_no_model_has_are_refused(pairs, message: str):
    with pytest.raises(UsageError, match=message):
        schedules.gpipe(3, 2).with_edges(pairs)


@pytest.mark.parametrize("pairs", [((0, 2),), ((1, 0),), (("a", 1),), 5])
def test_wrong_edges_of_a_schedule_are_a_finding(pairs):
    (found,) = schedules.Schedule("mine", schedules.gpipe(3, 2).actions, pairs).validate()
    assert found.rule == "edges"


@pytest.mark.parametrize("name", schedules.NAMED)
def test_every_order_of_a_chain_is_sound_for_any_edges(name: str):
    chunks = schedules.named(name, 2, 8).virtual_stages // 2
    schedule = schedules.named(name, 4 // chunks, 8).with_edges(DIAMOND)
    assert schedule.validate() == []
    assert schedule.with_messages().validate() == []
    assert schedule.with_messages().edges.pairs == tuple(DIAMOND)


def test_messages_follow_the_edges():
    schedule = schedules.gpipe(4, 1).with_edges(DIAMOND)
    assert schedule.with_messages().to_text().splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0",
        "3RECV_F0 3F0 3B0 3SEND_B0",
    ]


def test_branches_run_side_by_side_in_a_simulation():
    spans = {span.name: span.start for span in schedules.gpipe(4, 1).with_edges(DIAMOND).simulate(latency=0.5).spans}
    assert spans["1F0"] == spans["2F0"] == 1.5
    assert spans["3F0"] == 3.0


def test_what_a_skipping_message_waits_for_a_credit_is_found():
    """Three microbatches go from rank 0 to rank 2 at once; with one credit the second waits for rank 2 to use the first."""
    schedule = schedules.gpipe(3, 3).with_edges([(0, 1), (0, 2), (1, 2)])
    assert schedule.validate(credits=1) == []
    reversed_use = schedules.Schedule.from_text("0F0 0F1 0B1 0B0\n1F1 1F0 1B1 1B0\n2F1 2F0 2B1 2B0\n")
    assert reversed_use.with_edges([(0, 1), (0, 2), (1, 2)]).validate(credits=2) == []
    assert [each.rule for each in reversed_use.with_edges([(0, 1), (0, 2), (1, 2)]).validate(credits=1)] == ["deadlock"] * 3


class Fork:
    """x -> (x, x)."""

    def forward(self, x):
        return (x, x), None

    def backward(self, context, grad_y):
        self.grad = grad_y[0] + grad_y[1]


class Times:
    """x -> factor * x."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def forward(self, x):
        return self._factor * x, None

    def backward(self, context, grad_y):
        return self._factor * grad_y


class Product:
    """(a, b) -> a * b."""

    def forward(self, x):
        return x[0] * x[1], x

    def backward(self, context, grad_y):
        return grad_y * context[1], grad_y * context[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_diamond_gives_values_and_gradients_to_the_right_neighbours(seed: int):
    def body(group):
        stage = [Fork(), Times(2.0), Times(5.0), Product()][group.rank]
        pipe = Pipeline(stage, group, "1f1b", 2, edges=DIAMOND)
        loss = pipe.step(np.array([1.0, 3.0]), np.zeros(2), lambda y, _: (float(y.sum()), np.ones_like(y)), reduction="sum")
        return loss, getattr(stage, "grad", None)

    first, *_, last = run_world(4, body, faults=FaultPlan(delay_seconds=(0.0, 0.1)), seed=seed)
    assert last[0] == 10 * (1 + 9)
    assert first[1].tolist() == [2 * 10 * 3.0], "of the last microbatch, x = 3"


def test_a_stage_that_gives_one_value_to_several_is_told_so():
    def body(group):
        Pipeline(Layer(group.rank), group, "gpipe", 2, edges=[(0, 1), (0, 2), (1, 2)]).step(*batch(4), half_square)

    first, second, third = run_world(3, body, return_exceptions=True)
    assert isinstance(first, UsageError)
    assert "0F0 returned one ndarray, but stage 0 has edges to stages 1, 2" in str(first)
    assert isinstance(second, GroupAbortedError)
    assert isinstance(third, GroupAbortedError)


def test_ranks_with_different_edges_are_told_both():
    def body(group):
        edges = [(0, 1), (1, 2), (0, 2)] if group.rank else None
        with pytest.raises(CollectiveMismatchError, match=r"edges \(\(0, 1\), \(0, 2\), \(1, 2\)\)"):
            Pipeline(Layer(0), group, "gpipe", 2, edges=edges)

    run_world(3, body)
