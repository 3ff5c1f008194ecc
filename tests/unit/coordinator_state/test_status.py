"""The status of a job: times, links, stragglers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ferrorpc_coordinator.state.events import Received, Tick
from ferrorpc_coordinator.state.settings import SECOND, Limits, Settings

from ferrorpc.v1 import barrier_pb2, error_pb2, identity_pb2, rendezvous_pb2, session_pb2
from tests.transcripts.world import World


def world_of(size: int, **limits: int) -> World:
    """A world in its first generation."""
    world = World(Settings(durable=True, limits=Limits(**limits)))
    for rank in range(size):
        world.hello(f"m{rank}")
        policy = rendezvous_pb2.WorldPolicy(min_size=size, max_size=size)
        world.ask(f"m{rank}", join=rendezvous_pb2.JoinRequest(policy=policy, pinned_rank=rank, timeout_ms=60_000))
    return world


def status_of(world: World) -> session_pb2.StatusResponse:
    return world.coordinator.jobs[world.job].status()


def beat(world: World, rank: int, **fields: object) -> None:
    told = session_pb2.Beat(**fields)  # type: ignore[arg-type]
    stream = world.clients[f"m{rank}"].stream
    assert stream is not None
    world.step(Received(stream, session_pb2.ClientFrame(beat=told)))


def link(peer: int, sent: int, kind: str = "grpc") -> identity_pb2.Link:
    return identity_pb2.Link(peer_rank=peer, kind=kind, sent_bytes=sent)


def test_the_status_of_a_member_has_the_age_of_its_step_and_its_time_in_operations() -> None:
    world = world_of(2)
    beat(world, 0, step=4, operation_ms=1200, generation=1)
    world.clients["m0"].frozen = world.clients["m1"].frozen = True
    world.tick(2 * SECOND)
    beat(world, 0, step=4, operation_ms=1700, generation=1)
    beat(world, 1, step=5, generation=1)
    told = status_of(world).members
    assert [(member.step, member.step_age_ms, member.operation_ms) for member in told] == [(4, 2000, 1700), (5, 0, 0)]


def test_what_a_member_has_done_counts_from_the_beginning_of_its_generation() -> None:
    """Or a rank that hangs would be ahead of those that have taken the place of others."""
    world = world_of(2)
    training = identity_pb2.Training(steps=3)
    for rank in range(2):
        beat(world, rank, step=100 + rank, activity="all_reduce #100", operation_ms=9, training=training, generation=1)
    world.tick(SECOND)
    for rank in range(2):
        policy = rendezvous_pb2.WorldPolicy(min_size=2, max_size=2)
        join = rendezvous_pb2.JoinRequest(policy=policy, after_generation=1, pinned_rank=rank, timeout_ms=60_000)
        world.ask(f"m{rank}", join=join)
    beat(world, 0, step=101, operation_ms=10, training=training, generation=1)  # was under way
    told = status_of(world).members
    assert [(member.rank, member.step, member.step_age_ms, member.operation_ms) for member in told] == [(0,) * 4, (1, 0, 0, 0)]
    assert not any(member.HasField("training") for member in told)
    world.clients["m0"].frozen = world.clients["m1"].frozen = True
    beat(world, 1, step=1, generation=2)
    world.tick(3 * SECOND)
    assert [member.behind_ms for member in status_of(world).members] == [3000, 0]


def test_all_that_a_beat_tells_is_in_the_status() -> None:
    world = world_of(2)
    told: dict[str, Any] = {"links": [link(1, 7)], "training": identity_pb2.Training(steps=1, compute_ms=2)}
    for number, field in enumerate(session_pb2.Beat.DESCRIPTOR.fields, start=3):
        if field.name not in (*told, "generation"):
            told[field.name] = "busy" if field.type == field.TYPE_STRING else number
    beat(world, 0, generation=1, **told)
    (member, _) = status_of(world).members
    assert {name: getattr(member, name) for name in told} == told


def test_ages_of_former_members_count_from_the_restart() -> None:
    world = world_of(1)
    world.ask("m0", leave={})
    world.tick(900 * SECOND)
    world.restart()
    (told,) = status_of(world).members
    assert (told.state, told.beat_age_ms, told.step_age_ms) == (identity_pb2.MEMBER_STATE_LEFT, 0, 0)


def test_the_time_of_training_steps_is_that_of_the_last_beat_with_one() -> None:
    world = world_of(2)
    training = identity_pb2.Training(steps=3, compute_ms=300, exposed_ms=40, hidden_ms=20)
    beat(world, 0, generation=1, training=training)
    beat(world, 0, step=9, generation=1)
    told = status_of(world).members
    assert told[0].training == training
    assert not told[1].HasField("training")


def test_links_are_kept_for_their_generation_the_busiest_first() -> None:
    world = world_of(3)
    beat(world, 0, generation=1, links=[link(1, 10), link(2, 500, "shared_memory")])
    beat(world, 0, generation=1, links=[link(1, 90)])
    beat(world, 1, generation=7, links=[link(0, 1)])
    told = status_of(world).members
    assert [(found.peer_rank, found.kind, found.sent_bytes) for found in told[0].links] == [
        (2, "shared_memory", 500),
        (1, "grpc", 90),
    ]
    assert not told[1].links, "of a generation that is not its own"


def test_links_are_bounded_for_one_member_and_for_all_together() -> None:
    world = world_of(4, links=3, status_links=8)
    for rank in range(4):
        beat(world, rank, generation=1, links=[link(peer, peer) for peer in range(100, 200)])
    assert [len(member.links) for member in world.coordinator.jobs[world.job].members] == [3] * 4
    assert [len(member.links) for member in status_of(world).members] == [2] * 4


def test_the_status_of_an_open_barrier_has_arrival_times() -> None:
    world = world_of(3)
    world.tick(SECOND)
    request = barrier_pb2.BarrierRequest(generation=1, name="b", ordinal=1, timeout_ms=60_000)
    world.ask("m2", barrier=request)
    world.tick(SECOND)
    world.ask("m0", barrier=request)
    world.tick(SECOND)
    (barrier,) = status_of(world).barriers
    assert (list(barrier.arrived_ranks), list(barrier.arrived_after_ms)) == ([0, 2], [1000, 0])
    assert (list(barrier.missing_ranks), barrier.age_ms) == ([1], 2000)


def pages_of(world: World) -> Iterator[session_pb2.StatusResponse]:
    """The pages of the status, each as it is when it is asked for."""
    received, more = 0, True
    while more:
        page = world.replies[world.call(session_pb2.StatusRequest(job=world.job, after=received))]
        assert isinstance(page, session_pb2.StatusResponse)
        yield page
        received, more = received + len(page.barriers) + len(page.members), page.more


def test_a_status_comes_in_pages_that_make_up_the_whole() -> None:
    """At 10,000 members it would be larger than clients accept."""
    world = world_of(9, status_page_bytes=60)
    for name in ("a", "b"):
        world.ask("m2", barrier=barrier_pb2.BarrierRequest(generation=1, name=name, ordinal=1, timeout_ms=60_000))
    pages = list(pages_of(world))
    assert len(pages) > 2
    whole = session_pb2.StatusResponse()
    for page in pages:
        assert sum(part.ByteSize() for part in [*page.barriers, *page.members]) <= 60
        whole.MergeFrom(page)
    expected = status_of(world)
    assert whole.headline == expected.headline
    assert whole.barriers == expected.barriers
    assert whole.members == expected.members
    assert whole.generations == expected.generations


def test_a_barrier_that_is_released_between_two_pages_takes_no_member_with_it() -> None:
    world = world_of(9, status_page_bytes=60)
    released = barrier_pb2.BarrierRequest(generation=1, name="a", ordinal=1, timeout_ms=60_000)
    other = barrier_pb2.BarrierRequest(generation=1, name="b", ordinal=1, timeout_ms=60_000)
    world.ask("m0", barrier=released)
    world.ask("m0", barrier=other)
    ranks = []
    for number, page in enumerate(pages_of(world), start=1):
        ranks += [member.rank for member in page.members]
        for rank in range(1, 9) if number == 2 else ():
            world.ask(f"m{rank}", barrier=released)
    assert ranks == [*range(9)]


def test_the_first_page_tells_of_whoever_is_behind_on_a_later_one() -> None:
    world = world_of(9, status_page_bytes=60)
    for seconds in (20, 1):
        for rank in range(9):
            beat(world, rank, step=3 if rank < 8 else 2, generation=1)
            world.clients[f"m{rank}"].frozen = True
        world.tick(seconds * SECOND)
    first, last = (world.replies[world.call(session_pb2.StatusRequest(job=world.job, after=after))] for after in (0, 8))
    assert isinstance(first, session_pb2.StatusResponse)
    assert isinstance(last, session_pb2.StatusResponse)
    assert (first.headline.title, first.more) == ("Rank 8 has been behind for 21 s", True)
    assert [(member.name, member.behind_ms) for member in last.members] == [("m8", 21_000)]
    assert not last.HasField("headline")


def test_a_member_larger_than_a_page_has_one_of_its_own() -> None:
    world = world_of(2, status_page_bytes=1)
    first, second = (world.replies[world.call(session_pb2.StatusRequest(job=world.job, after=after))] for after in (0, 1))
    assert isinstance(first, session_pb2.StatusResponse)
    assert isinstance(second, session_pb2.StatusResponse)
    assert [(page.more, [member.name for member in page.members]) for page in (first, second)] == [
        (True, ["m0"]),
        (False, ["m1"]),
    ]


def test_a_straggler_counts_the_time_that_others_waited_for_it_alone() -> None:
    world = world_of(3)
    for ordinal, late in ((1, "m1"), (2, "m1"), (3, "m0")):
        request = barrier_pb2.BarrierRequest(generation=1, name="b", ordinal=ordinal, timeout_ms=60_000)
        first, second = (name for name in ("m0", "m1", "m2") if name != late)
        world.ask(first, barrier=request)
        world.tick(SECOND)
        world.ask(second, barrier=request)
        world.tick(SECOND // 2)
        world.ask(late, barrier=request)
    told = [(found.rank, found.barriers, found.waited_ms) for found in status_of(world).stragglers]
    assert told == [(1, 2, 1000), (0, 1, 500)]


def test_internal_barriers_have_no_stragglers() -> None:
    world = world_of(2)
    for name in ("ferrorpc/shared_memory/offers", "epoch"):
        request = barrier_pb2.BarrierRequest(generation=1, name=name, ordinal=1, timeout_ms=60_000)
        world.ask("m0", barrier=request)
        world.tick(SECOND)
        world.ask("m1", barrier=request)
    assert [(found.rank, found.barriers) for found in status_of(world).stragglers] == [(1, 1)]


def test_the_status_of_a_generation_has_the_times_that_this_coordinator_saw() -> None:
    world = world_of(2)
    world.tick(3 * SECOND)
    world.cut("m1")
    world.tick(5 * SECOND)
    (line,) = status_of(world).generations
    assert (line.age_ms, line.lasted_ms, line.broken) == (8000, 5000, True)
    world.restart()
    (line,) = status_of(world).generations
    assert line.broken
    assert not line.HasField("age_ms")
    assert not line.HasField("lasted_ms")


def test_ages_in_the_status_grow_while_no_member_is_there() -> None:
    world = world_of(2)
    world.tick(3 * SECOND)
    for name in ("m0", "m1"):
        world.ask(name, leave={})
    world.tick(600 * SECOND)
    world.step(Tick())
    status = status_of(world)
    (line,) = status.generations
    assert (line.age_ms, line.lasted_ms, line.broken) == (603_000, 3000, False)
    assert status.occurrences[-1].age_ms == 600_000


def test_who_asks_for_a_job_that_is_not_there_is_told_of_those_that_live_and_of_no_crowd() -> None:
    world = World()
    for number in range(20):
        world.job = f"job-{number:02}"
        world.hello(world.job)
        if number != 18:
            world.ask(world.job, leave=rendezvous_pb2.LeaveRequest())
    reply = world.replies[world.call(session_pb2.StatusRequest(job="absent"))]
    assert isinstance(reply, error_pb2.ErrorDetail)
    assert reply.hint.startswith("the jobs of this coordinator: job-18, job-00, job-01, ")
    assert reply.hint.endswith(", job-14, and 4 more")
