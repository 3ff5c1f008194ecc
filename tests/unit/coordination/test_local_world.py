"""A job in one process: membership, failures, named barriers, the exchange of ids."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from ferrorpc.coordination import local, local_exchange
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    InvalidRankError,
    InvalidWorldSizeError,
    LimitExceededError,
    NcclError,
    PeerLostError,
    RendezvousTimeoutError,
    StaleGenerationError,
    StoreTimeoutError,
    UsageError,
)
from ferrorpc.generation_errors import PEER_LEFT
from tests.threads import together


def on_all(world: LocalWorld, body: Callable[[LocalSession], Any], ranks: list[int]) -> list[Any]:
    """Runs `body(session)` on a thread per rank; an outcome is what it returned or raised."""
    return together([partial(body, world.session(rank)) for rank in ranks])


def test_every_member_starts_with_its_rank_and_knows_the_others():
    world = LocalWorld(3, job="trial")
    assignments = [world.session(rank).membership.assignment for rank in range(3)]
    assert [a.rank for a in assignments] == [0, 1, 2]
    assert {(a.job, a.cluster_id, a.generation, a.size) for a in assignments} == {("trial", world.cluster_id, 1, 3)}
    assert [peer.rank for peer in assignments[0].peers] == [0, 1, 2]


def test_two_worlds_are_two_clusters():
    assert LocalWorld(1).cluster_id != LocalWorld(1).cluster_id


@pytest.mark.parametrize(("size", "min_size"), [(0, None), (2, 3), (2, 0)])
def test_a_world_that_cannot_be_is_refused(size, min_size):
    with pytest.raises(InvalidWorldSizeError):
        LocalWorld(size, min_size=min_size)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(InvalidRankError):
        LocalWorld(2).session(2)


def test_a_killed_member_is_lost_to_the_others_and_fenced_itself():
    world = LocalWorld(3)
    sessions = [world.session(rank) for rank in range(3)]
    world.kill(1, "signal 9")
    for rank in (0, 2):
        cause = sessions[rank].membership.latch.cause
        assert isinstance(cause, PeerLostError)
        assert (cause.rank, cause.reason) == (1, "signal 9")
    assert isinstance(sessions[1].membership.latch.cause, StaleGenerationError)
    with pytest.raises(StaleGenerationError):
        sessions[1].store.set("a", b"1")


def test_the_first_cause_of_a_generations_end_stays():
    world = LocalWorld(2)
    world.session(0).membership.latch.end(NcclError("first"))
    world.kill(1, "later")
    assert str(world.session(0).membership.latch.cause).startswith("first")


def test_only_the_rank_whose_deadline_passed_has_timed_out():
    world = LocalWorld(3)
    world.session(2).membership.latch.end(CollectiveTimeoutError([0], "all_reduce #4 waited 1 s for rank 0"))
    assert isinstance(world.session(2).membership.latch.cause, CollectiveTimeoutError)
    for rank in (0, 1):
        cause = world.session(rank).membership.latch.cause
        assert isinstance(cause, GroupAbortedError)
        assert (cause.rank, cause.cause) == (2, "all_reduce #4 waited 1 s for rank 0")


def test_a_clean_leave_breaks_nothing():
    world = LocalWorld(2)
    world.session(1).leave()
    assert world.session(0).membership.latch.cause is None


def test_leaving_with_a_reason_is_a_loss_to_the_others():
    world = LocalWorld(2)
    world.session(1).leave("ValueError: no such file")
    cause = world.session(0).membership.latch.cause
    assert isinstance(cause, PeerLostError)
    assert (cause.rank, cause.reason) == (1, "ValueError: no such file")


def test_leaving_twice_is_leaving_once():
    world = LocalWorld(2)
    session = world.session(1)
    session.leave()
    session.leave("too late to be a reason")
    assert world.session(0).membership.latch.cause is None
    with pytest.raises(GroupClosedError):
        session.barrier("b")


def test_a_lost_link_between_the_living_names_the_link():
    world = LocalWorld(3)
    world.session(0).report_link_lost(2, "connection reset")
    cause = world.session(1).membership.latch.cause
    assert isinstance(cause, GroupAbortedError)
    assert cause.rank == 0
    assert "rank 0 and rank 2" in cause.cause
    assert "connection reset" in str(cause)


def test_a_lost_link_to_one_who_left_names_its_end():
    world = LocalWorld(3)
    world.session(2).leave()
    world.session(0).report_link_lost(2, "end of stream")
    cause = world.session(1).membership.latch.cause
    assert isinstance(cause, PeerLostError)
    assert cause.reason == "it left the job"
    assert "still needs it" in str(cause)


def test_a_lost_link_to_one_who_said_goodbye_names_its_end():
    """It closed its streams, and is about to leave."""
    world = LocalWorld(3)
    world.session(0).report_link_lost(2, PEER_LEFT)
    cause = world.session(1).membership.latch.cause
    assert isinstance(cause, PeerLostError)
    assert cause.reason == "it left the job"


def test_a_barrier_gathers_payloads_in_rank_order():
    world = LocalWorld(4)
    results = on_all(world, lambda s: s.barrier("b", str(s.rank).encode()), [3, 1, 0, 2])
    assert results == [[b"0", b"1", b"2", b"3"]] * 4


def test_a_barrier_of_some_ranks_needs_only_those_and_can_be_used_again():
    world = LocalWorld(3)

    def twice(session: LocalSession) -> list[list[bytes]]:
        mine = str(session.rank).encode()
        return [session.barrier("pair", mine + b"a", ranks=[0, 2]), session.barrier("pair", mine + b"b", ranks=[2, 0])]

    assert on_all(world, twice, [0, 2]) == [[[b"0a", b"2a"], [b"0b", b"2b"]]] * 2


def test_a_barrier_that_is_interrupted_keeps_its_payloads_for_the_rank_whatever_others_meet_for_meanwhile(monkeypatch):
    world = LocalWorld(3)

    def interrupted(condition, find, until):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(world.condition), "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.session(1).barrier("all", b"1")
    on_all(world, lambda s: (s.barrier("all", str(s.rank).encode()), s.barrier("pair", ranks=[0, 2])), [0, 2])
    assert world.session(1).barrier("all", b"1") == [b"0", b"1", b"2"]


def test_a_join_that_is_interrupted_leaves_no_member_that_nobody_runs(monkeypatch):
    world = LocalWorld(2, min_size=1)
    world.kill(1, "signal 9")

    def interrupted(condition, find, until):
        assert find() is None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(world.condition), "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.join(20)
    assert world.session(0).rejoin(20).assignment.size == 1


def test_barriers_that_all_have_left_are_known_for_a_while(monkeypatch):
    monkeypatch.setattr(local, "REMEMBERED_BARRIERS", 3)
    world = LocalWorld(2)
    on_all(world, lambda s: [s.barrier("b", bytes(4096)) for _ in range(10)], [0, 1])
    for rank in (0, 1):
        with pytest.raises(BarrierTimeoutError):
            world.session(rank).barrier("late", timeout=0.01)
    kept = world.generation.exchanges
    assert list(kept) == [("barrier", "b", 9), ("barrier", "b", 10), ("barrier", "late", 1)]
    assert not any(exchange.arrived for exchange in kept.values())
    assert not kept["barrier", "b", 9].outcome, "only the last one keeps payloads"


def test_a_barrier_that_lacks_ranks_names_each_and_breaks_nothing():
    world = LocalWorld(3)
    world.session(2).activity.note("broadcast #7")
    with pytest.raises(BarrierTimeoutError) as caught:
        world.session(0).barrier("b", timeout=0.05)
    assert caught.value.missing == [1, 2]
    assert "rank 1" in str(caught.value)
    assert "s ago, step 1, last seen in broadcast #7" in str(caught.value)
    assert world.session(0).membership.latch.cause is None
    with pytest.raises(
        BarrierTimeoutError, match=r"rank 1 came when the others had given up: barrier 'b' was not .*: rank 1"
    ) as late:
        world.session(1).barrier("b")
    assert late.value.missing == [1, 2]
    assert "next use of this name" in late.value.hint
    assert on_all(world, lambda s: len(s.barrier("c", timeout=20)), [0, 1, 2]) == [3, 3, 3]


def test_a_barrier_ends_at_once_when_a_participant_dies():
    world = LocalWorld(3)
    timer = threading.Timer(0.1, lambda: world.kill(2, "signal 9"))
    timer.start()
    outcomes = on_all(world, lambda s: s.barrier("b", timeout=25), [0, 1])
    assert [(type(o), o.rank) for o in outcomes] == [(PeerLostError, 2)] * 2
    timer.join()


def test_the_cause_of_an_end_keeps_no_frame_of_the_operation_that_failed():
    world = LocalWorld(2)
    try:
        raise GroupAbortedError(1, "over")
    except GroupAbortedError as error:
        world.session(1).membership.latch.end(error)
    assert [world.session(rank).membership.latch.cause.__traceback__ for rank in range(2)] == [None, None]


def test_a_barrier_of_a_broken_generation_is_refused_also_where_all_come_to_it():
    world = LocalWorld(2)
    world.session(1).membership.latch.end(GroupAbortedError(1, "over"))
    for rank in range(2):
        with pytest.raises(GroupAbortedError, match="over"):
            world.session(rank).barrier("b")


def test_a_barrier_whose_participant_left_cannot_be_complete():
    world = LocalWorld(2)
    world.session(1).leave()
    with pytest.raises(PeerLostError, match="left the job"):
        world.session(0).barrier("b", timeout=25)
    assert world.session(0).membership.latch.cause is None


def test_participants_must_agree_on_who_takes_part():
    world = LocalWorld(3)
    with pytest.raises(BarrierTimeoutError):
        world.session(0).barrier("b", ranks=[0, 1], timeout=0.01)
    with pytest.raises(UsageError, match="names the participants"):
        world.session(1).barrier("b")


def test_participants_must_agree_also_with_those_who_have_left_already():
    """As with a coordinator. The one that was refused has used its number, and so has not the next barrier's."""
    world = LocalWorld(3)
    on_all(world, lambda s: s.barrier("b", ranks=[0, 1]), [0, 1])
    with pytest.raises(UsageError, match=r"rank 2 names the participants \[0, 2\], others \[0, 1\]"):
        world.session(2).barrier("b", ranks=[0, 2])
    assert on_all(world, lambda s: s.barrier("b", str(s.rank).encode()), [0, 1, 2]) == [[b"0", b"1", b"2"]] * 3


def test_a_barrier_without_the_caller_or_with_strangers_is_refused():
    with pytest.raises(InvalidRankError):
        LocalWorld(3).session(0).barrier("b", ranks=[1, 2])
    with pytest.raises(InvalidRankError):
        LocalWorld(3).session(0).barrier("b", ranks=[0, 3])


def test_a_large_payload_is_refused_before_it_is_sent():
    world = LocalWorld(2)
    with pytest.raises(LimitExceededError):
        world.session(0).barrier("b", bytes(4097))


def test_payloads_that_are_too_large_together_are_refused_to_all_as_by_a_coordinator(monkeypatch):
    monkeypatch.setattr(local_exchange, "BARRIER_BYTES_MAX", 8192)

    def meet(session):
        with pytest.raises(LimitExceededError, match="payloads of barrier 'b' would be 12288, the limit barrier_bytes is 8192"):
            session.barrier("b", bytes(4096))
        return len(session.barrier("b"))

    assert on_all(LocalWorld(4), meet, range(4)) == [4] * 4


@pytest.mark.parametrize("wrong", [{"payload": "text"}, {"ranks": 0}, {"ranks": ["0"]}, {"timeout": -1.0}, {"timeout": "1 s"}])
def test_what_is_no_payload_no_list_of_ranks_or_no_time_is_refused_and_no_barrier_is_counted(wrong):
    world = LocalWorld(2)
    with pytest.raises(UsageError):
        world.session(0).barrier("b", **wrong)
    assert on_all(world, lambda s: s.barrier("b", bytearray(b"x"), timeout=float("inf")), [0, 1]) == [[b"x", b"x"]] * 2


def test_survivors_of_an_elastic_world_go_on_with_the_ranks_they_can_keep():
    world = LocalWorld(4, min_size=2)
    survivors = [world.session(rank) for rank in (0, 2, 3)]
    world.session(0).store.set("kept", b"yes")
    world.kill(1, "signal 9")
    memberships = on_all(world, lambda s: s.rejoin(20), [0, 2, 3])
    assert [m.assignment.rank for m in memberships] == [0, 2, 1]
    assert {(m.assignment.generation, m.assignment.size) for m in memberships} == {(2, 3)}
    assert all(m.latch.cause is None for m in memberships)
    assert "rank 1 was lost" in memberships[0].assignment.reason
    assert survivors[0].store.get("kept") == b"yes"


@pytest.mark.parametrize(("min_size", "lost", "rank"), [(None, 1, 1), (None, 0, 0), (2, 2, 2), (2, 0, 1)])
def test_a_replacement_gets_the_free_rank_but_not_rank_0_of_an_elastic_world(min_size, lost, rank):
    world = LocalWorld(3, min_size=min_size)
    world.kill(lost, "signal 9")
    joined: list[LocalSession] = []
    thread = threading.Thread(target=lambda: joined.append(world.join(20)))
    thread.start()
    survivors = [world.session(number) for number in range(3) if number != lost]
    while not survivors[0].pending_members:
        pass
    on_all(world, lambda s: s.rejoin(20), [number for number in range(3) if number != lost])
    thread.join(20)
    assert joined[0].membership.assignment.rank == rank
    assert world.session(rank) is joined[0]


def test_a_round_that_does_not_fill_says_whom_it_lacks():
    world = LocalWorld(3, min_size=1)
    with pytest.raises(RendezvousTimeoutError) as caught:
        world.session(0).rejoin(0.05)
    assert caught.value.missing == [1, 2]


@pytest.mark.parametrize("gave_up", [False, True])
def test_who_called_reform_and_gave_up_has_not_left(gave_up):
    world = LocalWorld(2)
    if gave_up:
        with pytest.raises(RendezvousTimeoutError):
            world.session(1).rejoin(0.05)
    world.session(0).report_link_lost(1, PEER_LEFT)
    cause = world.session(0).membership.latch.cause
    assert ("it called reform() already" in str(cause)) == gave_up
    assert ("it left the job" in str(cause)) != gave_up


def test_a_barrier_ends_at_once_if_a_rank_that_it_needs_calls_reform():
    world = LocalWorld(3)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(world.session(0).barrier, "epoch", timeout=20)
        elsewhere = pool.submit(world.session(2).barrier, "pair", ranks=[0, 2], timeout=20)
        with pytest.raises(RendezvousTimeoutError):
            world.session(1).rejoin(0.05)
        with pytest.raises(GroupAbortedError, match="it called reform\\(\\) already, and barrier 'epoch' still needs it"):
            waits.result(20)
        world.session(0).barrier("pair", ranks=[0, 2], timeout=20)
        assert elsewhere.result(20) == [b"", b""]


def test_survivors_that_give_up_together_name_whom_nobody_replaced_and_not_each_other():
    world = LocalWorld(3)
    world.kill(1, "signal 9")
    for error in on_all(world, lambda s: s.rejoin(0.2), [0, 2]):
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing == [1]
        assert "rank 1 (member-1): dead (signal 9)" in str(error)
    with pytest.raises(RendezvousTimeoutError) as caught:
        world.session(0).rejoin(0.05)
    assert caught.value.missing == [1, 2], "rank 2 does not ask any more"


def test_a_joiner_is_pending_until_the_others_reform():
    world = LocalWorld(3, min_size=1)
    world.kill(2, "signal 9")
    on_all(world, lambda s: s.rejoin(20), [0, 1])
    generation = world.session(0).membership
    thread = threading.Thread(target=lambda: world.join(20))
    thread.start()
    while not world.session(0).pending_members:
        pass
    assert generation.latch.cause is None
    on_all(world, lambda s: s.rejoin(20), [0, 1])
    thread.join(20)
    assert world.session(0).membership.assignment.size == 3
    assert world.session(0).pending_members == []
    assert isinstance(generation.latch.cause, StaleGenerationError)


def test_a_spare_is_pending_only_once_there_is_room():
    world = LocalWorld(2, min_size=1)
    spare = threading.Thread(target=lambda: world.join(20))
    spare.start()
    while len(world.sessions) < 3 or not world.sessions[2].rejoining:
        pass
    assert world.session(0).pending_members == []
    world.kill(1, "signal 9")
    assert world.session(0).pending_members == ["member-2"]
    world.session(0).rejoin(20)
    spare.join(20)
    assert [peer.name for peer in world.session(0).membership.assignment.peers] == ["member-0", "member-2"]


def test_keys_bound_to_a_session_or_a_generation_vanish_with_it():
    world = LocalWorld(2, min_size=1)
    store = world.session(1).store
    store.set("mine", b"1", bind="session")
    store.set("ours", b"2", bind="generation")
    store.set("everyones", b"3")
    assert world.session(0).store.add("mine") == 2
    assert world.session(0).store.compare_set("ours", b"2", b"3")
    world.session(1).leave()
    assert world.session(0).store.keys() == ["everyones", "ours"]
    world.session(0).rejoin(20)
    assert world.session(0).store.keys() == ["everyones"]


def test_an_id_reaches_all_ranks_of_its_communicator():
    world = LocalWorld(3)
    minted = bytes(range(128))
    results = on_all(
        world, lambda s: s.exchange_nccl_id("world", 1, [0, 1, 2], [minted] if s.rank == 0 else None, 20), [2, 1, 0]
    )
    assert results == [[minted]] * 3


def test_a_leader_that_cannot_mint_tells_the_others():
    world = LocalWorld(2)
    failure = NcclError("no device")
    results = on_all(world, lambda s: s.exchange_nccl_id("world", 1, [0, 1], failure if s.rank == 0 else None, 20), [0, 1])
    assert [str(r) for r in results] == [str(failure)] * 2
    results = on_all(world, lambda s: s.exchange_nccl_id("world", 2, [0, 1], [b"x" * 128] if s.rank == 0 else None, 20), [0, 1])
    assert results == [[b"x" * 128]] * 2


def test_an_id_that_never_comes_is_a_timeout_naming_the_leader():
    with pytest.raises(CollectiveTimeoutError) as caught:
        LocalWorld(2).session(1).exchange_nccl_id("world", 1, [0, 1], None, 0.05)
    assert caught.value.waiting_on == [0]


def test_members_are_described_by_what_they_last_did():
    world = LocalWorld(3)
    world.session(1).activity.note("all_reduce #3")
    world.kill(2, "signal 9")
    alive, dead = world.session(0).describe([1, 2, 7], timeout=1.0)
    assert (alive.rank, alive.state, alive.step, alive.activity) == (1, "active", 1, "all_reduce #3")
    assert (dead.rank, dead.state, dead.reason) == (2, "dead", "signal 9")


def test_a_key_that_vanishes_each_time_is_waited_for_no_longer_than_asked(monkeypatch):
    """It is set and deleted again before who waits for it can read it."""
    world = LocalWorld(1)

    class Vanishing(dict):
        def __contains__(self, key):
            return True

    monkeypatch.setattr(world.keyspace, "values", Vanishing())
    with pytest.raises(StoreTimeoutError):
        world.session(0).store.get("k", timeout=0.05)


def test_a_key_cannot_be_bound_to_a_generation_that_is_over():
    """It would never vanish: its time has come already."""
    world = LocalWorld(3, min_size=2)
    sessions = [world.session(rank) for rank in range(3)]
    sessions[0].membership.latch.end(NcclError("the end"))
    with pytest.raises(NcclError, match="the end"):
        sessions[1].store.set("k", b"", bind="generation")
    sessions[2].leave()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda session: session.rejoin(10.0), sessions[:2]))
    sessions[0].store.set("k", b"", bind="generation")
    sessions[0].membership.latch.end(NcclError("the next end"))
    assert sessions[1].store.keys() == []


@pytest.mark.parametrize("all_came_meanwhile", [False, True])
def test_a_barrier_that_was_interrupted_is_gone_on_with_by_the_next_call(monkeypatch, all_came_meanwhile):
    """Else this rank would meet the others' next use of the name from then on."""
    world = LocalWorld(2)
    zero, one = world.session(0), world.session(1)

    def interrupted(*_):
        monkeypatch.undo()
        found.extend([one.barrier("x", b"peer")] if all_came_meanwhile else [])
        raise KeyboardInterrupt

    found = []
    monkeypatch.setattr(zero, "_wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zero.barrier("x", b"first")
    calls = [] if all_came_meanwhile else [lambda: one.barrier("x", b"peer")]
    found += together([lambda: zero.barrier("x", b"again"), *calls])
    assert found == [[b"first" if all_came_meanwhile else b"again", b"peer"]] * 2
    assert on_all(world, lambda session: session.barrier("x", b"next"), [0, 1]) == [[b"next"] * 2] * 2
