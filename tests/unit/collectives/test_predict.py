"""Predicted times, held against closed forms worked out by hand and against the catalogue's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrorpc.collectives.algorithms.algorithm import Algorithm, Cost
from ferrorpc.collectives.algorithms.catalogue import CATALOGUE, CHUNK_BYTES
from ferrorpc.collectives.algorithms.plan import Buffer, FoldOwn, Load, Plan, Quantise, Receive, Region, Send
from ferrorpc.collectives.call import Call, Operation, example
from ferrorpc.collectives.predict import CHUNKS_MAX, _Rank, predict
from ferrorpc.collectives.select import DEFAULT_TUNING, seconds
from ferrorpc.collectives.step_simulation import OUTWARDS
from ferrorpc.collectives.tuning import Tuning
from ferrorpc.errors import UsageError
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.cost_table import Costs

ALPHA, MESSAGE, BETA, GAMMA = 1e-4, 1e-5, 1e-9, 2e-10
COSTS = Costs(ALPHA, MESSAGE, BETA, GAMMA)
FEW = 2
"""Processors for all ranks."""
MIB = 1 << 20


def entry(operation: Operation, name: str, hosts=()):
    return next(found for found in Tuning(hosts=hosts).algorithms_of(operation) if found.name == name)


def time_of(operation: str, name: str, nbytes: int, size: int, costs: Costs = COSTS) -> float:
    return predict(entry(Operation(operation), name), example(operation, nbytes, size), size, costs).seconds


def test_one_message_takes_alpha_its_opening_and_its_bytes():
    assert time_of("broadcast", "direct", 4000, 2) == pytest.approx(ALPHA + MESSAGE + 4000 * BETA)
    assert time_of("broadcast", "direct", 8 * MIB, 2) == pytest.approx(ALPHA + MESSAGE + 8 * MIB * BETA)


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "ring"])
def test_where_there_is_nothing_to_do_it_takes_no_time(name):
    assert time_of("all_reduce", name, 0, 8) == 0


def made(*plans: Plan) -> Algorithm:
    """An algorithm of one plan for each rank."""
    return Algorithm("made", lambda call, rank, size: plans[rank], lambda size, nbytes: Cost(1, nbytes))


def test_a_plan_that_waits_for_ever_is_an_error_and_not_a_wait_for_ever():
    brought, got = Region(Buffer.IN, 0, 0, 4), Region(Buffer.OUT, 0, 0, 4)
    plans = (Plan((Receive(1 - rank, 0, got), Send(1 - rank, 0, brought))) for rank in range(2))
    with pytest.raises(UsageError, match="made never ends: 2 ranks wait"):
        predict(made(*plans), example("all_reduce", 16, 2), 2, COSTS)


def test_an_array_is_written_again_only_after_it_has_left():
    n, costs = 1000, Costs(0.0, MESSAGE, BETA, GAMMA)
    brought, work = Region(Buffer.IN, 0, 0, n), Region(Buffer.WORK, 0, 0, n)
    sends = Plan((Load(brought, work), Send(1, 0, work), FoldOwn(brought, work)), (n,))
    receives = Plan((Receive(0, 0, Region(Buffer.OUT, 0, 0, n)),))
    found = predict(made(sends, receives), example("all_reduce", 4 * n, 2), 2, costs).seconds
    assert found == pytest.approx(MESSAGE + 4 * n * (BETA + GAMMA))


def test_a_bundle_is_packed_again_only_after_it_has_left():
    steps = predict(entry(Operation.ALL_TO_ALL, "bruck"), example("all_to_all", 4000, 3), 3, COSTS).steps
    assert steps is not None
    first, second = (index for index, step in enumerate(steps.all) if (step.rank, step.lane) == (0, OUTWARDS))
    (packed,) = steps.all[second].needs
    assert first in steps.all[packed].needs


def test_what_is_quantised_is_sent_only_after_it_has_arrived():
    n = 1000
    brought, got = Region(Buffer.IN, 0, 0, n), Region(Buffer.OUT, 0, 0, n)
    begins = Plan((Send(1, 0, brought), Receive(1, 1, got)))
    returns = Plan((Receive(0, 0, got), Quantise(got), Send(0, 1, got)))
    found = predict(made(begins, returns), example("all_reduce", 4 * n, 2), 2, COSTS).seconds
    assert found == pytest.approx(2 * (ALPHA + MESSAGE + 4 * n * BETA))


def test_links_are_shared_one_message_after_the_other():
    assert time_of("broadcast", "direct", 4000, 5) == pytest.approx(ALPHA + 4 * (MESSAGE + 4000 * BETA))
    assert time_of("gather", "direct", 4000, 5) == pytest.approx(ALPHA + 4 * (MESSAGE + 4000 * BETA))


def test_chunks_stream_through_a_chain():
    chunk = CHUNK_BYTES * BETA
    assert time_of("broadcast", "chain", 8 * CHUNK_BYTES, 5) == pytest.approx(4 * (ALPHA + MESSAGE) + (8 + 3) * chunk)
    assert time_of("broadcast", "chain", CHUNK_BYTES, 5) == pytest.approx(4 * (ALPHA + MESSAGE) + 4 * chunk)


def test_a_small_ring_waits_for_every_round_and_folds_in_half_of_them():
    part = 1000 * 4
    rounds = 6 * (ALPHA + MESSAGE + part * BETA) + 3 * part * GAMMA
    assert time_of("all_reduce", "ring", 4 * part, 4) == pytest.approx(rounds)


def test_a_long_ring_folds_while_it_receives():
    slices = 6 * 16 * MIB * BETA
    found = time_of("all_reduce", "ring", 64 * MIB, 4)
    assert slices < found < slices + 6 * (ALPHA + MESSAGE) + 3 * CHUNK_BYTES * (GAMMA + BETA)


def test_rounds_on_no_elements_wait_for_one_another():
    assert time_of("barrier", "dissemination", 0, 8) == pytest.approx(3 * (ALPHA + MESSAGE))
    assert time_of("barrier", "direct", 0, 8) == pytest.approx(ALPHA + 7 * MESSAGE)


def test_halves_travel_at_their_size_and_partial_sums_at_their_work_size():
    half = TensorSpec(DType.FLOAT16, (1024,))

    def sent(name: str) -> float:
        return predict(entry(Operation.REDUCE, name), Call(Operation.REDUCE, (half,), ReduceOp.SUM, 0), 4, COSTS).sent_bytes

    assert sent("direct") == 2048
    assert sent("tree") == 4096


def crowded(processors: int, alpha: float = ALPHA) -> Costs:
    return Costs(alpha, MESSAGE, BETA, GAMMA, processors)


def test_where_processors_are_short_all_ranks_work_takes_its_time():
    one_end = MESSAGE + 4000 * BETA
    for size in (4, 7):
        work = size * (size - 1) * 2 * one_end
        for processors in (1, 2, 3):
            found = time_of("all_gather", "direct", 4000, size, crowded(processors, 0.0))
            assert work / processors <= found * (1 + 1e-9) < work / processors + 2 * one_end
    assert time_of("broadcast", "direct", 4000, 2, crowded(1)) == pytest.approx(ALPHA + one_end)
    assert time_of("broadcast", "direct", 4000, 2, crowded(1, 0.0)) == pytest.approx(2 * one_end)


def test_folding_keeps_a_processor_too():
    n, costs = 4000, Costs(0.0, 0.0, 0.0, GAMMA, 1)
    assert time_of("reduce_scatter", "direct", 4 * n, 4, costs) == pytest.approx(4 * 3 * n * GAMMA)
    assert time_of("reduce_scatter", "direct", 4 * n, 4, replace(costs, processors=None)) == pytest.approx(3 * n * GAMMA)


def test_the_closed_form_knows_that_processors_can_be_enough_for_all():
    cost = entry(Operation.ALL_REDUCE, "two_shot").cost(8, MIB)
    free = seconds(cost, 8, COSTS)
    assert seconds(cost, 8, crowded(1000)) == free < seconds(cost, 8, crowded(1))


@pytest.mark.parametrize("operation", list(Operation))
def test_processors_enough_for_all_are_as_good_as_any_number(operation):
    for found in Tuning(hosts=(0, 0, 1, 1, 1)).algorithms_of(operation):
        call = example(operation.value, 3 * MIB, 5)
        free = predict(found, call, 5, COSTS).seconds
        assert predict(found, call, 5, crowded(3 * 5)).seconds == free
        assert predict(found, call, 5, crowded(2)).seconds >= free * (1 - 1e-9)


def test_never_are_more_steps_under_way_than_there_are_processors_or_lanes():
    prediction = predict(entry(Operation.ALL_REDUCE, "two_shot"), example("all_reduce", 5 * MIB, 5), 5, crowded(2))
    steps = prediction.steps
    assert steps is not None
    spans = [(start, start + step.seconds, step) for start, step in zip(steps.starts, steps.all, strict=True) if step.seconds]
    for start, _, step in spans:
        beside = [other for begun, ended, other in spans if begun <= start < ended - 1e-12]
        assert len(beside) <= 2
        assert sum(other.place == step.place for other in beside) == 1


@pytest.mark.parametrize("operation", list(Operation))
def test_a_chunk_waits_for_what_a_scan_of_all_chunks_finds(operation, monkeypatch):
    def scan(rank, first, last):
        found = set()
        for action, began, low, high, start in rank._needs[rank.at]:
            low, high = max(start + first, low) - began, min(start + last, high) - began
            found.update(done.step for done in rank._done[action] if done.start < high and low < done.stop)
        return found

    def steps():
        every = [
            (found, nbytes) for found in Tuning(hosts=(0, 0, 1, 1, 1)).algorithms_of(operation) for nbytes in (44, 64 * MIB)
        ]
        return [predict(found, example(operation.value, nbytes, 5), 5, COSTS).steps.all for found, nbytes in every]

    quick = steps()
    monkeypatch.setattr(_Rank, "_before", scan)
    assert quick == steps()


LOOSE = {"tree", "pairwise", "scatter_all_gather", "bruck", "hierarchical"}
"""Whose busiest rank is not who everybody waits for, or whose rounds overlap."""
PAIRS = [(operation, found.name) for operation, entries in CATALOGUE.items() for found in entries if found.name not in LOOSE]


@pytest.mark.parametrize(("operation", "name"), PAIRS, ids=lambda value: str(getattr(value, "value", value)))
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [4096, 16 * MIB])
@pytest.mark.parametrize("processors", [None, FEW])
def test_the_closed_form_is_near_what_is_followed(operation, name, size, nbytes, processors):
    costs = replace(DEFAULT_TUNING.costs(size), processors=processors)
    call = example(operation.value, nbytes, size)
    per_rank = nbytes // (size if operation is Operation.SCATTER else 1)
    closed = seconds(entry(operation, name).cost(size, per_rank), size, costs)
    followed = predict(entry(operation, name), call, size, costs).seconds
    assert 0.7 < followed / closed < (1.4 if processors is None else 1.5)


@pytest.mark.parametrize("operation", list(Operation))
def test_every_algorithm_can_be_followed(operation):
    for hosts in ((0, 0, 1, 1, 1), ()):
        for found in Tuning(hosts=hosts).algorithms_of(operation):
            prediction = predict(found, example(operation.value, 3 * MIB, 5), 5, COSTS)
            assert prediction.steps is not None
            assert prediction.seconds >= ALPHA
            lanes = prediction.timeline("a title")
            assert lanes.makespan <= prediction.seconds * 1e3 * (1 + 1e-9)
            assert all(busy <= lanes.makespan * (1 + 1e-9) for busy in lanes.busy)


def test_what_is_too_large_to_be_followed_is_the_closed_form_and_cannot_be_drawn():
    size = CHUNKS_MAX
    prediction = predict(entry(Operation.ALL_REDUCE, "ring"), example("all_reduce", MIB, size), size, COSTS)
    assert prediction.steps is None
    assert prediction.seconds > 2 * (size - 1) * ALPHA
    with pytest.raises(UsageError, match="too many messages"):
        prediction.timeline("")


def test_few_messages_of_very_many_pieces_are_not_followed_either():
    """Bruck's messages hold half of all blocks each: to follow them would take minutes."""
    size = 480
    prediction = predict(entry(Operation.ALL_TO_ALL, "bruck"), example("all_to_all", 4096, size), size, COSTS)
    assert (prediction.steps, prediction.messages) == (None, 9)


def test_a_thousand_ranks_are_followed_where_their_messages_are_few():
    prediction = predict(entry(Operation.BARRIER, "dissemination"), Call(Operation.BARRIER), 1024, COSTS)
    assert prediction.steps is not None
    assert prediction.seconds == pytest.approx(10 * (ALPHA + MESSAGE))
