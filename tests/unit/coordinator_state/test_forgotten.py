"""What a coordinator forgets first of what it may not keep for ever, also after it has restarted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ferrorpc_coordinator.state.barriers import OUTCOME_BYTES
from ferrorpc_coordinator.state.events import UnaryRequest
from ferrorpc_coordinator.state.settings import Limits, Settings

from ferrorpc.v1 import barrier_pb2, session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import arrive, join, set_


def forgetful(**limits: int) -> World:
    """A world whose coordinator has a journal and these limits."""
    return World(Settings(durable=True, limits=replace(Limits(), **limits)))


def test_after_a_restart_the_job_that_is_forgotten_for_a_new_one_still_ended_first() -> None:
    world = forgetful(jobs=3)
    for job in ("c", "a", "b"):
        world.job = job
        world.hello(f"of-{job}")
    for job in ("b", "c", "a"):
        world.ask(f"of-{job}", leave={})
    world.restart()
    for job, left in (("d", {"a", "c", "d"}), ("e", {"a", "d", "e"})):
        world.job = job
        world.hello(f"of-{job}")
        assert set(world.coordinator.jobs) == left


@pytest.mark.parametrize("restarts", [False, True])
def test_no_generation_of_a_job_that_was_removed_comes_again(restarts: bool) -> None:
    """Its processes may still be around: tensors, addresses and NCCL ids of theirs carry its numbers, and its name."""
    world = forgetful(jobs=1)
    join(world, "a", "b")
    join(world, "a", "b")
    assert world.clients["a"].generation == 2
    for name in ("a", "b"):
        world.ask(name, leave={})
    world.job = "other"
    world.hello("c")
    assert set(world.coordinator.jobs) == {"other"}
    if restarts:
        world.restart()
        world.hello("c", resume=True)
    world.ask("c", leave={})
    world.job = "job"
    for name in ("a", "b"):
        world.hello(name)
        world.clients[name].generation = 0  # a new process
    join(world, "a", "b")
    assert world.clients["a"].generation == 3


def test_whatever_a_removed_job_claimed_the_members_of_later_ones_may_come_back() -> None:
    """Its numbers are not given out again, also where one was the highest that a member may claim."""
    world = forgetful(jobs=1, generation_number=9)
    for job, claimed, expected in (("hostile", 9, 10), ("job", 0, 11), ("other", 0, 12), ("job", 11, 13)):
        world.job, member = job, f"of-{job}-after-{claimed}"
        world.hello(member)
        world.clients[member].generation = claimed
        join(world, member)
        assert world.clients[member].generation == expected
        world.ask(member, leave={})


def test_after_a_restart_the_member_that_is_forgotten_still_left_first() -> None:
    world = forgetful(gone_members=2)
    join(world, "a", "b", "c", "d")
    for name in ("c", "b"):
        world.ask(name, leave={})
    world.restart()
    world.hello("a", resume=True)
    world.ask("a", leave={})
    assert {member.name for member in world.coordinator.jobs["job"].members} == {"a", "b", "d"}


def test_a_job_that_makes_room_for_another_takes_no_memory_until_the_garbage_collector_finds_it() -> None:
    """Its parts refer to each other, and values are memory that the collector does not see."""
    world = forgetful(jobs=1)
    join(world, "a")
    job = world.coordinator.jobs["job"]
    world.ask("a", leave={})
    value = store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k", value=b"v"))
    for name in ("job", "other"):
        world.call(session_pb2.UnaryStoreRequest(job=name, request=value))
    assert set(world.coordinator.jobs) == {"other"}
    assert (list(job.members), job.generations.newest.number, len(job.store.keyspace)) == ([], 0, 0)
    assert not job.store.watches._history
    assert not job.generations.history


@pytest.mark.parametrize("operation", [{"get": {"key": "k"}}, {"keys": {}}, {"delete": {"key": "k"}}, {"unwatch": {}}])
def test_who_only_reads_in_an_unknown_job_does_not_begin_it(operation: dict[str, Any]) -> None:
    """Else a mistyped name would take the place of a job that has ended, and whose store is still needed."""
    world = forgetful(jobs=1)
    join(world, "a")
    world.ask("a", leave={})
    rows = dict(world.rows)
    reply = world.replies[world.call(session_pb2.UnaryStoreRequest(job="jbo", request=store_pb2.StoreRequest(**operation)))]
    assert isinstance(reply, session_pb2.UnaryStoreResponse)
    assert not reply.response.found
    assert (set(world.coordinator.jobs), world.rows) == ({"job"}, rows)
    assert not world.coordinator._calls


@pytest.mark.parametrize("wait", [{"get": {"key": "k", "wait_ms": 1_000}}, {"wait": {"keys": ["k"], "wait_ms": 1_000}}])
def test_who_waits_in_an_unknown_job_begins_it(wait: dict[str, Any]) -> None:
    world = forgetful()
    waits = world.call(session_pb2.UnaryStoreRequest(job="job", request=store_pb2.StoreRequest(**wait)))
    join(world, "a")
    set_(world, "a", "k", b"v")
    assert isinstance(world.replies[waits], session_pb2.UnaryStoreResponse)


def ended_jobs_with_a_store(world: World, *names: str) -> None:
    for name in names:
        set_a = store_pb2.StoreRequest(set=store_pb2.SetOperation(key="result", value=b"v"))
        world.call(session_pb2.UnaryStoreRequest(job=name, request=set_a))


def exit_of(job: str) -> session_pb2.UnaryReportRequest:
    """What a launcher reports of a program that never joined."""
    report = session_pb2.ReportRequest(exit=session_pb2.ProcessExit(name="box-0", instance_id="i", returncode=1))
    return session_pb2.UnaryReportRequest(job=job, request=report)


@pytest.mark.parametrize(
    "request_",
    [
        session_pb2.UnaryStoreRequest(job="typo", request=store_pb2.StoreRequest(set=store_pb2.SetOperation(key="bad key"))),
        session_pb2.UnaryStoreRequest(job="typo", request=store_pb2.StoreRequest()),
        session_pb2.UnaryBarrierRequest(job="typo", request=barrier_pb2.BarrierRequest(name="x", generation=1)),
        session_pb2.UnaryReportRequest(job="typo"),
        exit_of("typo"),
    ],
)
def test_what_leaves_nothing_in_an_unknown_job_takes_the_place_of_no_other(request_: UnaryRequest) -> None:
    world = forgetful(jobs=2)
    ended_jobs_with_a_store(world, "a", "b")
    rows = dict(world.rows)
    world.call(request_)
    assert (set(world.coordinator.jobs), world.rows) == ({"a", "b"}, rows)


def test_a_job_that_holds_nothing_makes_room_before_one_that_ended_earlier() -> None:
    world = forgetful(jobs=3)
    ended_jobs_with_a_store(world, "a", "b")
    world.call(exit_of("typo"))
    assert set(world.coordinator.jobs) == {"a", "b", "typo"}  # who waits for that process in it is told
    ended_jobs_with_a_store(world, "c")
    assert set(world.coordinator.jobs) == {"a", "b", "c"}


def lost_answer(world: World, *others: int) -> int:
    """Barrier "x" is released among rank 0 and others while the stream of rank 0 is down; returns the number of its request."""
    number = arrive(world, "a", "x", ranks=[0, *others])
    world.cut("a")
    for rank in others:
        arrive(world, "abcd"[rank], "x", ranks=[0, *others])
    return number


@pytest.mark.parametrize("limit", [{"remembered_barriers": 4}, {"remembered_barrier_bytes": 4 * OUTCOME_BYTES}])
@pytest.mark.parametrize("restarted", [False, True])
def test_the_outcome_of_a_barrier_outlives_any_number_among_others(limit: dict[str, int], restarted: bool) -> None:
    """Else a member whose stream broke just then would wait at it until its timeout."""
    world = forgetful(**limit)
    join(world, "a", "b", "c", "d")
    number = lost_answer(world, 1)
    for ordinal in range(1, 10):
        for name in "cd":
            arrive(world, name, "y", ordinal, ranks=[2, 3])
    if restarted:
        world.restart()
    world.hello("a", resume=True)
    assert world.clients["a"].results[number].HasField("barrier")
    outcomes = sum(table == "barrier" for table, _ in world.rows)
    assert outcomes <= 1 + 4
    assert outcomes == len(world.coordinator.jobs["job"].barriers._outcomes)


def test_of_many_sets_of_participants_with_one_barrier_each_the_oldest_outcome_is_forgotten() -> None:
    world = forgetful(remembered_barrier_bytes=4 * OUTCOME_BYTES)
    join(world, "a", "b", "c", "d")
    number = lost_answer(world, 1, 2, 3)
    for ranks in ([1, 2], [1, 3], [2, 3], [1, 2, 3]):
        for rank in ranks:
            arrive(world, "abcd"[rank], f"of {ranks}", ranks=ranks)
    assert len(world.coordinator.jobs["job"].barriers._outcomes) == 3
    world.hello("a", resume=True)
    assert number not in world.clients["a"].results


def test_nothing_is_kept_of_participants_without_outcomes() -> None:
    world = forgetful()
    join(world, "a", "b")
    for name in "ab":
        arrive(world, name, "x")
        arrive(world, name, "tool", generation=0, count=2)
    barriers = world.coordinator.jobs["job"].barriers
    assert len(barriers._outcomes_of) == 2
    join(world, "a", "b")
    assert len(barriers._outcomes_of) == len(barriers._outcomes) == 1
