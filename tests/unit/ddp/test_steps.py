"""The times of steps: their computation from known times, and their recording, comparison and drawing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from ferrorpc.coordination.activity import Activity
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.bucket_reduction import BucketReduction
from ferrorpc.ddp.steps import Step, Steps, StepTimes
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import ManualClock
from ferrorpc.types import DType, TensorSpec
from ferrorpc.work import Work
from tests.unit.ddp.world import run_world


@pytest.mark.parametrize(
    ("buckets", "hidden"),
    [
        ((), 0.0),
        (((0, 2.0, 3.0), (1, 5.0, 6.0)), 2.0),  # apart
        (((0, 2.0, 5.0), (1, 3.0, 4.0)), 3.0),  # one within the other
        (((1, 4.0, 7.0), (0, 2.0, 5.0)), 5.0),  # overlapping, in any order
        (((0, 8.0, 12.0), (1, 11.0, 12.0)), 2.0),  # what comes after 10 is exposed
    ],
)
def test_communication_before_the_wait_is_hidden_and_counts_once(buckets, hidden):
    assert Step(3, 1.0, 10.0, 12.0, buckets).times == StepTimes(9.0, 2.0, hidden)


def test_a_reduction_ends_when_its_last_collective_is_complete_although_no_callback_has_run_yet():
    """done() is true before on_done callbacks run."""
    clock = ManualClock()
    told = []
    operations = [Work(clock, "first"), Work(clock, "second")]
    for work in operations:
        work.on_done = told.append
    bucket = lay_out([("a", TensorSpec(DType.FLOAT32, (3,)))], 1024).buckets[0]
    reduction = BucketReduction(bucket, (work for work in operations), clock, clock.parker(), nullcontext)
    operations[0].complete(None)
    assert not reduction.advance()
    clock.advance(2.0)
    told[0]()
    clock.advance(2.0)
    operations[1].complete(None)
    assert reduction.advance()
    assert (reduction.started, reduction.ended) == (0.0, 4.0)


def test_two_threads_may_advance_a_bucket():
    """A backward pass may report gradients on several threads."""
    entered, go = threading.Event(), threading.Event()
    operations = [Work(SYSTEM_CLOCK, "first"), Work(SYSTEM_CLOCK, "second")]

    def begun():
        yield operations[0]
        entered.set()
        go.wait(20)
        yield operations[1]

    bucket = lay_out([("a", TensorSpec(DType.FLOAT32, (3,)))], 1024).buckets[0]
    reduction = BucketReduction(bucket, begun(), SYSTEM_CLOCK, SYSTEM_CLOCK.parker(), nullcontext)
    operations[0].complete(None)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(reduction.advance)
        entered.wait(20)
        other = pool.submit(reduction.advance)
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.05, go.set)
        assert [one.result(20), other.result(20)] == [False, False]
    operations[1].complete(None)
    assert reduction.advance()


def test_steps_are_kept_compared_between_ranks_and_drawn(tmp_path):
    like = {"a": np.zeros(400, np.float32), "b": np.zeros(300, np.float32)}

    def body(group):
        sync = GradientSynchronizer(like, group, bucket_cap_mb=1e-3)
        assert sync.steps.mean() == StepTimes(0.0, 0.0, 0.0)
        for _ in range(4):
            sync(like)
        path = tmp_path / f"{group.rank}.json"
        sync.steps.to_chrome_trace(path)
        return list(sync.steps), sync.steps.mean(), sync.steps.by_rank(), json.loads(path.read_text())

    results = run_world(2, body)
    for rank, (steps, mean, by_rank, trace) in enumerate(results):
        assert [step.number for step in steps] == [0, 1, 2, 3]
        for before, step in pairwise(steps):
            assert before.ended == step.began <= step.wait_began <= step.ended
            assert sorted(bucket for bucket, _, _ in step.buckets) == [0, 1]
            assert all(started <= ended <= step.ended for _, started, ended in step.buckets)
            assert step.times.hidden_seconds <= step.times.compute_seconds
        assert mean.compute_seconds == pytest.approx(sum(step.times.compute_seconds for step in steps[1:]) / 3)
        assert by_rank[rank] == pytest.approx(mean)
        assert by_rank == results[0][2]
        drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert sorted(event["name"] for event in drawn if event["cat"] == "exposed") == [f"wait {n}" for n in range(4)]
        assert sum(event["cat"] == "communication" for event in drawn) == 8
        last = next(event for event in drawn if event["name"] == "wait 3")
        assert last["dur"] == pytest.approx(steps[3].times.exposed_seconds * 1e6)


def test_telemetry_is_not_told_of_the_very_first_step_whose_beginning_is_unknown(monkeypatch):
    told = []
    monkeypatch.setattr("ferrorpc.ddp.steps.telemetry", lambda: SimpleNamespace(stepped=lambda *times: told.append(times)))
    (group,) = run_world(1, lambda group: group)
    steps = Steps(group)
    steps.add(Step(0, 0.0, 5.0, 5.25, ()))
    steps.add(Step(1, 5.25, 6.25, 6.75, ()))
    assert told == [(1.0, 0.5, 0.0)]


def test_a_thread_may_look_at_the_times_while_the_next_step_ends():
    class Watched:
        """The next step ends just when somebody looks at this one."""

        began, wait_began, ended, times = 0.0, 1.0, 2.0, StepTimes(1.0, 1.0, 0.0)

        def looked_at(self):
            steps.add(Step(2, 2.0, 3.0, 4.0, ()))
            return ()

        number = buckets = property(looked_at)

    (group,) = run_world(1, lambda group: group)
    steps = Steps(group)
    steps.add(Watched())
    for look in (steps.mean, steps.timeline, lambda: repr(steps)):
        before = len(steps)
        look()
        assert len(steps) > before


def test_steps_and_the_wait_for_the_means_are_reported_to_the_coordinator() -> None:
    activity, clock = Activity(), ManualClock(2.0)
    steps = Steps(SimpleNamespace(session=SimpleNamespace(activity=activity)))
    with steps.waiting(clock):
        assert activity.beat(1, 5.0).operation_ms == 3_000
        clock.advance(4.0)
    assert activity.beat(1, 9.0).operation_ms == 4_000
    steps.add(Step(1, 0.0, 4.0, 5.0, ((0, 1.0, 3.0),)))
    training = activity.beat(1, 5.0).training
    assert (training.steps, training.compute_ms, training.exposed_ms, training.hidden_ms) == (1, 4_000, 1_000, 2_000)
