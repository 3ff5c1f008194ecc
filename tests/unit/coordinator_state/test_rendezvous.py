"""Who is in a round when it closes, and what the others hear of those who wait."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode, RendezvousTimeoutError
from ferrorpc.v1 import rendezvous_pb2
from ferrorpc.wire.error_detail import restore
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import ask_elastic, error, join, labelled


def pending_names(world: World, name: str) -> list[list[str]]:
    """What a member was told of those who wait, in order."""
    return [list(event.pending.names) for event in world.clients[name].events if event.HasField("pending")]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (2, 1)])
def test_a_world_of_a_size_that_cannot_be_is_refused(low: int, high: int) -> None:
    world = World()
    ask_elastic(world, "a", low, high)
    assert error(world, "a").code == ErrorCode.INVALID_WORLD_SIZE


def test_who_asks_again_replaces_its_request() -> None:
    world = World()
    join(world, "a", size=2)
    first = world.clients["a"].sequence
    join(world, "a", size=2)
    assert world.clients["a"].results[first].error.code == ErrorCode.USAGE
    join(world, "b", size=2)
    assert [world.clients[name].rank for name in "ab"] == [0, 1]


def test_a_round_does_not_close_with_a_member_whose_stream_has_ended() -> None:
    world = World()
    join(world, "a", "b", size=3)
    world.cut("b")
    join(world, "c", size=3)
    assert world.coordinator.jobs["job"].generations.newest.number == 0
    world.hello("b", resume=True)
    assert [world.clients[name].rank for name in "abc"] == [0, 1, 2]


def test_members_of_the_next_generation_are_told_anew_who_still_waits() -> None:
    """They assume that nobody does, and one whose stream had ended got no place."""
    world = World()
    ask_elastic(world, "a", 1, 3)
    ask_elastic(world, "d", 1, 3)
    assert pending_names(world, "a") == [["d"]]
    world.cut("d")
    ask_elastic(world, "a", 1, 3)
    assert world.clients["a"].generation == 2
    assert pending_names(world, "a") == [["d"], ["d"]]


def test_who_resumes_is_told_who_waits() -> None:
    world = World()
    ask_elastic(world, "a", 1, 3)
    world.cut("a")
    ask_elastic(world, "d", 1, 3)
    world.tick(SECOND)
    world.hello("a", resume=True)
    assert pending_names(world, "a") == [["d"]]


def test_a_working_generation_is_not_ended_by_those_who_want_to_join_it() -> None:
    world = World()
    ask_elastic(world, "a", 1, 2)
    ask_elastic(world, "d", 1, 2)
    world.tick(50 * SECOND)
    assert (world.clients["a"].generation, world.clients["d"].generation) == (1, 0)
    ask_elastic(world, "a", 1, 2)
    assert [world.clients[name].generation for name in "ad"] == [2, 2]


@pytest.mark.parametrize("broken", [False, True])
def test_who_asks_for_another_size_is_refused_and_never_the_members_of_the_generation(broken: bool) -> None:
    world = World()
    for name in "ab":
        ask_elastic(world, name, 1, 2, last_call_ms=1_000)
    if broken:
        world.ask("b", leave={"reason": "killed"})
    ask_elastic(world, "late", 1, 8)
    refused = error(world, "late")
    assert (refused.code, refused.retryable) == (ErrorCode.CONFIG, True), "the members may be about to leave"
    assert "late asks for a world of 1:8, a for one of 1:2" in refused.message
    assert pending_names(world, "a") == []
    for name in "a" if broken else "ab":
        ask_elastic(world, name, 1, 2)
    assert world.clients["a"].generation == 2


def test_a_job_may_go_on_in_another_size_once_its_last_members_are_gone() -> None:
    world = World()
    for name in "ab":
        ask_elastic(world, name, 2, 2)
    for name in "ab":
        world.cut(name)
    ask_elastic(world, "c", 1, 1)
    assert world.clients["c"].generation == 0, "those who had the other size may come back"
    world.tick(5 * SECOND)
    assert world.clients["c"].generation == 2


@pytest.mark.parametrize("asks", ["a", "d"])
def test_who_came_with_another_size_while_no_member_was_connected_is_refused_once_one_is(asks: str) -> None:
    """Else members would be refused for it when they reform, or others would be in a world of a size they never asked for."""
    world = World()
    join(world, "a", "b")
    for name in "ab":
        world.cut(name)
    for name in "ce":
        join(world, name, size=3)
    for name in "ab":
        world.hello(name, resume=True)
    join(world, asks, size=2)
    for name in "ce":
        refused = error(world, name)
        assert (refused.code, refused.retryable) == (ErrorCode.CONFIG, True), "the members may be about to leave"
        assert f"{name} asks for a world of 3, a for one of 2" in refused.message
    join(world, "b" if asks == "a" else "a", size=2)
    assert world.clients["a"].generation == (2 if asks == "a" else 1)


def test_who_has_left_a_generation_may_ask_for_another_size_again_until_the_others_have() -> None:
    """As a script that goes on with some of its ranks: the others may be a moment later."""
    world = World()
    join(world, "a", "b", "c")
    for name in "ab":
        world.ask(name, leave={})
        world.hello(name)
    join(world, "a", size=2)
    refused = error(world, "a")
    assert refused.retryable
    assert "a asks for a world of 2, c for one of 3" in refused.message
    world.ask("c", leave={})
    for name in "ab":
        join(world, name, size=2)
    assert [world.clients[name].generation for name in "ab"] == [2, 2]


def test_who_asks_for_another_size_than_one_that_may_be_dead_may_try_again() -> None:
    world = World()
    ask_elastic(world, "a", 2, 2)
    world.cut("a")
    ask_elastic(world, "c", 1, 1)
    refused = error(world, "c")
    assert refused.retryable
    assert "c asks for a world of 1, a, whose session ended, for one of 2" in refused.message
    assert "start this process again when a is known to be gone" in refused.hint


def test_members_of_a_broken_generation_are_waited_for_before_others_get_their_places() -> None:
    world = World()
    for name in ("a", "b"):
        ask_elastic(world, name, 1, 2, last_call_ms=1_000)
    world.ask("b", leave={"reason": "killed"})
    for name in ("c", "d"):
        ask_elastic(world, name, 1, 2)
    world.tick(4 * SECOND)
    assert [world.clients[name].generation for name in "cd"] == [0, 0]
    ask_elastic(world, "a", 1, 2)
    assert [world.clients[name].generation for name in "acd"] == [2, 2, 0]


def test_newcomers_do_not_go_on_alone_while_a_survivor_lives() -> None:
    """They would train from the start, and the survivor, which is busy, would have to take their weights."""
    world = World()
    for name in "abx":
        ask_elastic(world, name, 2, 3, last_call_ms=1_000)
    world.ask("x", leave={"reason": "killed"})
    for name in "cd":
        ask_elastic(world, name, 2, 3)
    world.tick(30 * SECOND)
    assert [world.clients[name].generation for name in "cd"] == [0, 0]
    ask_elastic(world, "b", 2, 3)
    world.tick(4 * SECOND)
    assert world.clients["c"].generation == 0, "the other survivor may come"
    world.tick(2 * SECOND)
    assert [world.clients[name].generation for name in "abcd"] == [1, 2, 2, 2]


def test_newcomers_go_on_once_the_last_survivor_is_gone() -> None:
    world = World()
    for name in "ab":
        ask_elastic(world, name, 1, 2, last_call_ms=1_000)
    world.ask("b", leave={"reason": "killed"})
    ask_elastic(world, "c", 1, 2)
    world.tick(10 * SECOND)
    assert world.clients["c"].generation == 0
    world.ask("a", leave={})
    assert world.clients["c"].generation == 2


def test_a_round_without_survivors_waits_for_the_longest_last_call() -> None:
    world = World()
    ask_elastic(world, "a", 1, 3)
    world.ask("a", leave={"reason": "killed"})
    for name, milliseconds in (("b", 3_000), ("c", 1_000)):
        ask_elastic(world, name, 2, 3, last_call_ms=milliseconds)
    world.tick(5 * SECOND // 2)
    assert world.clients["b"].generation == 0
    world.tick(SECOND)
    assert [world.clients[name].generation for name in "bc"] == [2, 2]


def test_who_times_out_during_a_last_call_is_told_of_nobody_missing() -> None:
    world = World()
    for name in "ab":
        ask_elastic(world, name, 2, 3, last_call_ms=90_000)
    world.tick(60 * SECOND)
    told = restore(error(world, "a"))
    assert isinstance(told, RendezvousTimeoutError)
    assert told.missing == []
    assert "2 of 2 to 3 came, and others were still called for" in told.message


def test_who_gave_up_before_a_member_asked_is_one_that_does_not_ask() -> None:
    world = World()
    join(world, "a", "b", "c", "d")
    join(world, "c", size=4)
    join(world, "a", size=4, timeout_ms=1_000)
    world.tick(2 * SECOND)
    join(world, "b", size=4, timeout_ms=1_000)
    world.tick(2 * SECOND)
    told = restore(error(world, "b"))
    assert isinstance(told, RendezvousTimeoutError)
    assert told.missing == [0, 3]


def test_who_waits_for_survivors_of_a_generation_that_is_over_sees_the_last_call() -> None:
    world = World()
    for name in "abx":
        ask_elastic(world, name, 1, 3)
        world.tick(SECOND)
    for name in "abx":
        ask_elastic(world, name, 1, 3)
    generation = world.clients["a"].generation
    world.ask("x", leave={"reason": "killed"})
    ask_elastic(world, "b", 1, 3)
    reason = world.coordinator.jobs["job"].rendezvous.waiting_reason()
    told = f"generation {generation} is over, its members have not all asked for another: a; last call for 5.0 s more"
    assert reason == f"1 of 1 to 3 members ask to join; {told}"


def test_a_member_that_asked_and_whose_stream_ended_is_waited_for_until_it_is_dead() -> None:
    world = World()
    for name in ("a", "b"):
        ask_elastic(world, name, 1, 2)
        world.tick(SECOND)
    ask_elastic(world, "a", 1, 2)
    assert [world.clients[name].generation for name in "ab"] == [2, 2]
    ask_elastic(world, "b", 1, 2)
    world.cut("b")
    ask_elastic(world, "a", 1, 2)
    assert world.clients["a"].generation == 2
    world.hello("b", resume=True)
    assert [world.clients[name].generation for name in "ab"] == [3, 3]


def test_a_pinned_rank_may_be_one_that_no_launcher_pinned_or_that_the_last_world_had_not() -> None:
    world = World()
    ask_elastic(world, "a", 1, 2)
    for name, rank in (("b", 0), ("c", 1)):
        number = ask_elastic(world, name, 1, 2, pinned_rank=rank)
        assert number not in world.clients[name].results
    world.ask("a", leave={})
    assert [world.clients[name].rank for name in "bc"] == [0, 1]


@pytest.mark.parametrize("broken", [False, True])
def test_a_spare_that_waited_in_vain_may_try_again_while_a_place_can_become_free(broken: bool) -> None:
    world = World()
    join(world, "a", "b")
    if broken:
        world.ask("b", leave={"reason": "killed"})
    join(world, "s", size=2, timeout_ms=1_000)
    world.tick(SECOND)
    refused = error(world, "s")
    assert (refused.code, refused.retryable) == (ErrorCode.RENDEZVOUS_TIMEOUT, not broken)


@pytest.mark.parametrize("low", [2, 3])
def test_survivors_that_nobody_joins_are_told_how_a_lost_rank_is_replaced(low: int) -> None:
    world = World()
    for name in "abc":
        ask_elastic(world, name, low, 3)
    for name in "abc"[low - 1 :]:
        world.ask(name, leave={"reason": "killed"})
    for name in "abc"[: low - 1]:
        ask_elastic(world, name, low, 3)
    world.tick(61 * SECOND)
    told = error(world, "a")
    assert told.code == ErrorCode.RENDEZVOUS_TIMEOUT
    assert "--restart worker" in told.hint
    assert "MIN:MAX" in told.hint


def test_who_joins_first_is_sent_to_the_logs_of_the_missing() -> None:
    world = World()
    join(world, "a", size=2, timeout_ms=1_000)
    world.tick(SECOND)
    assert "logs" in error(world, "a").hint


def test_the_end_of_a_spare_concerns_nobody() -> None:
    world = World()
    join(world, "a")
    join(world, "s", "t", size=1)
    world.cut("s")
    world.ask("t", leave={})
    world.tick(5 * SECOND)
    told = [event.WhichOneof("kind") for event in world.clients["a"].events]
    assert "broken" not in told
    assert "standings" not in told
    newest = world.coordinator.jobs["job"].generations.newest
    assert not newest.over
    assert not newest.departed


def test_a_last_call_that_was_given_up_begins_anew() -> None:
    """Who comes to a round that had too few for a while is waited for as long as in a new one."""
    world = World()
    for name in "ab":
        ask_elastic(world, name, 2, 4, last_call_ms=3_000)
    world.tick(2 * SECOND)
    world.ask("b", leave={})
    world.tick(2 * SECOND)
    ask_elastic(world, "c", 2, 4, last_call_ms=3_000)
    world.tick(2 * SECOND)
    ask_elastic(world, "d", 2, 4, last_call_ms=3_000)
    assert [world.clients[name].rank for name in "acd"] == [-1, -1, -1]
    world.tick(SECOND)
    assert [world.clients[name].rank for name in "acd"] == [0, 1, 2]


def test_a_last_call_begins_anew_when_a_member_that_was_cut_off_is_back() -> None:
    world = World()
    for name in "ab":
        ask_elastic(world, name, 2, 3, last_call_ms=3_000)
    world.tick(2 * SECOND)
    world.cut("b")
    world.tick(3 * SECOND // 2)
    world.hello("b", resume=True)
    world.tick(2 * SECOND)
    assert [world.clients[name].rank for name in "ab"] == [-1, -1]
    world.tick(SECOND)
    assert [world.clients[name].rank for name in "ab"] == [0, 1]


@pytest.mark.parametrize("cut", [False, True])
def test_the_second_to_claim_a_rank_is_to_try_again_only_if_the_first_may_be_dead(cut: bool) -> None:
    world = World()
    ask_elastic(world, "a", 2, 2, pinned_rank=0)
    if cut:
        world.cut("a")
    ask_elastic(world, "b", 2, 2, pinned_rank=0)
    refused = error(world, "b")
    assert (refused.code, refused.retryable) == (ErrorCode.CONFIG, cut)
    assert ("whose session ended" in refused.message) == cut


@pytest.mark.parametrize("cut", [False, True])
def test_a_pinned_rank_of_a_generation_is_for_another_only_once_its_holder_is_cut_off(cut: bool) -> None:
    world = World()
    for rank, name in enumerate("ab"):
        ask_elastic(world, name, 2, 2, pinned_rank=rank)
    if cut:
        world.cut("b")
    number = ask_elastic(world, "c", 2, 2, pinned_rank=1)
    if cut:
        assert number not in world.clients["c"].results
    else:
        assert error(world, "c").code == ErrorCode.CONFIG


def test_those_who_wait_are_told_of_a_process_that_was_refused_for_its_name() -> None:
    """As of two containers that share a host name, whose processes have the same number."""
    world = World()
    join(world, "host-1", size=2, timeout_ms=5000)
    first = world.clients["host-1"]
    world.hello("host-1", host="host", instance="2")
    assert world.clients["host-1"].stream is None
    world.clients["host-1"] = first
    world.tick(6 * SECOND)
    assert "Refused: the name 'host-1' in job job is used by a living process" in error(world, "host-1").message
    world.hello("host-1", host="host", instance="3")
    world.clients["host-1"] = first
    join(world, "host-1", size=2, timeout_ms=5000)
    world.tick(6 * SECOND)
    assert "Refused" not in error(world, "host-1").message, "nobody waited for that one"


@pytest.mark.parametrize("cut", [False, True])
def test_two_runs_that_use_one_job_by_mistake_do_not_mix(cut: bool) -> None:
    """Each has a rank that is late: without it the others would be a world."""
    world = World()
    labelled(world, "run", "1", "host-0", "host-1")
    labelled(world, "run", "2", "other-1")
    join(world, "host-0", size=2)
    if cut:
        world.cut("host-0")
    join(world, "other-1", size=2)
    refused = error(world, "other-1")
    assert (refused.code, refused.retryable) == (ErrorCode.CONFIG, cut)
    gone = ", whose session ended," if cut else ""
    assert f"other-1 and host-0{gone} are of two runs of `ferrorpc run`, with the same job job" in refused.message
    if cut:
        world.hello("host-0", resume=True)
    join(world, "host-1", size=2)
    assert [world.clients[name].rank for name in ("host-0", "host-1", "other-1")] == [0, 1, -1]


def test_a_run_that_goes_on_is_not_refused_for_one_that_waits() -> None:
    world = World()
    labelled(world, "run", "1", "host-0", "host-1")
    join(world, "host-0", "host-1")
    labelled(world, "run", "2", "other-0", "other-1")
    join(world, "other-0", size=2)
    join(world, "other-1", size=2)
    world.cut("host-1")
    world.tick(5 * SECOND)
    join(world, "host-0", size=2)
    for name in ("other-0", "other-1"):
        refused = error(world, name)
        assert refused.code == ErrorCode.CONFIG
        assert f"{name} and host-0 are of two runs" in refused.message
    labelled(world, "run", "1", "host-1")
    join(world, "host-1", size=2)
    assert [world.clients[name].generation for name in ("host-0", "host-1")] == [2, 2]


def test_runs_use_one_job_after_each_other_and_take_members_that_are_of_none() -> None:
    world = World()
    labelled(world, "run", "1", "a")
    labelled(world, "run", "", "b")
    join(world, "a", "b")
    labelled(world, "run", "2", "c")
    join(world, "c", size=2)
    for name in "ab":
        world.cut(name)
    world.tick(5 * SECOND)
    labelled(world, "run", "", "d")
    join(world, "d", size=2)
    assert [world.clients[name].generation for name in "cd"] == [2, 2]


def test_who_had_a_missing_rank_last_is_named_not_a_process_that_came_back_for_it_and_went() -> None:
    world = World()
    join(world, "a", "b", size=2)
    join(world, "s", size=2)  # a spare
    world.ask("b", leave=rendezvous_pb2.LeaveRequest(reason="OSError: the disk is full"))
    join(world, "a", size=2)
    assert world.clients["s"].rank == 1
    world.hello("b")
    join(world, "b", size=2)
    world.ask("b", leave=rendezvous_pb2.LeaveRequest())
    world.ask("s", leave=rendezvous_pb2.LeaveRequest(reason="CUDA error"))
    join(world, "a", size=2, timeout_ms=5000)
    world.tick(6 * SECOND)
    message = error(world, "a").message
    assert "missing: rank 1; rank 1 (s): dead (CUDA error)" in message, message
