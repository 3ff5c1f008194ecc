"""What is counted, and under which bound and label."""

from ferrorpc_coordinator.metrics import (
    MEMBERS_BY_RANK_MAX,
    Counters,
    Histogram,
    beat_ages,
    longest_behind_seconds,
    members_by_state,
)
from ferrorpc_coordinator.state.effects import Persist, Send
from ferrorpc_coordinator.state.events import Received
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join
from tests.unit.ferrorpc_coordinator.test_driver import ManualJournal, driven, turns


def test_a_value_counts_in_each_bucket_up_to_its_bound():
    histogram = Histogram((0.5, 2.0))
    for value in (0.0, 0.5, 0.6, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.buckets() == [("0.5", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 5.2


def test_answers_are_counted_by_kind():
    counters = Counters()
    counters.observe(session_pb2.ServerFrame(result={"barrier": {"spread_ms": 1500}}), 3)
    counters.observe(session_pb2.ServerFrame(result={"error": {"code": int(ErrorCode.BARRIER_TIMEOUT)}}), 2)
    assert counters.barrier_spread.total == 1.5
    assert +counters.request_errors == {"barrier_timeout": 2}


@driven
async def test_an_error_counts_for_each_request_that_it_answers(make):
    late = session_pb2.ServerFrame(result={"error": {"code": int(ErrorCode.BARRIER_TIMEOUT)}})
    driver, _ = make(lambda event: [Send(late, ((1, b""), (2, b"")))] if isinstance(event, Received) else [])
    for _ in range(2):
        driver.connect(session_pb2.Hello())
    driver.receive(1, session_pb2.ClientFrame())
    assert +driver._counters.request_errors == {"barrier_timeout": 2}


@driven
async def test_it_is_known_for_how_long_the_journal_has_been_writing(make):
    journal = ManualJournal()
    driver, _ = make(lambda event: [Persist("t", "a", b"1")], journal)
    assert driver.journal_waits_ns == 0
    driver.tick()
    await turns()
    driver._flushed_ns -= 7 * SECOND
    assert driver.journal_waits_ns >= 7 * SECOND
    journal.groups[0][1]()
    await turns()
    assert driver.journal_waits_ns == 0


def test_what_happens_to_members_and_generations_is_counted_also_where_nobody_is_left_to_be_told():
    world, counters = World(), Counters()

    def noted() -> tuple[dict[str, int], dict[str, int]]:
        for note in world.notes:
            counters.noted(note)
        world.notes.clear()
        return dict(+counters.member_changes), dict(+counters.first_causes)

    join(world, "a", "b")
    world.cut("a")
    world.hello("a", resume=True)
    assert noted() == ({"suspect": 1, "active": 1}, {})
    world.cut("a")
    world.cut("b")
    world.tick(120 * SECOND)
    assert noted() == ({"suspect": 3, "active": 1, "dead": 2}, {"peer_lost": 1})


def test_counters_start_at_zero():
    """Prometheus sees no increase in the first value of a new series."""
    counters = Counters()
    assert counters.first_causes["peer_lost"] == counters.member_changes["dead"] == 0
    assert {"peer_lost", "collective_mismatch"} <= set(counters.first_causes)
    assert {"dead", "stalled"} <= set(counters.member_changes)
    assert "barrier_timeout" in counters.request_errors


def test_only_living_members_have_a_beat_age():
    world = World()
    join(world, "active", "stalled", "suspect", "dead", "left")
    world.hello("waiting")
    world.clients["stalled"].frozen = True
    world.tick(4 * SECOND)
    world.ask("left", leave={})
    world.ask("dead", leave={"reason": "a bug"})
    world.cut("suspect")
    job = world.coordinator.jobs["job"]
    assert members_by_state(job) == {"active": 1, "stalled": 1, "suspect": 1, "dead": 1, "left": 1, "waiting": 1}
    ranks = {name: job.members.get(name).rank for name in ("active", "stalled", "suspect")}
    assert beat_ages(job) == {ranks["active"]: 0, ranks["stalled"]: 4, ranks["suspect"]: 0}


def test_a_large_job_has_no_beat_ages():
    for members, ages in ((MEMBERS_BY_RANK_MAX, MEMBERS_BY_RANK_MAX), (MEMBERS_BY_RANK_MAX + 1, 0)):
        world = World()
        join(world, *(f"m{number}" for number in range(members)))
        job = world.coordinator.jobs["job"]
        assert (members_by_state(job), len(beat_ages(job))) == ({"active": members}, ages)


def test_who_has_not_been_heard_of_since_a_restart_has_no_beat_age():
    world = World()
    join(world, "a", "b")
    world.restart()
    world.hello("b", resume=True)
    job = world.coordinator.jobs["job"]
    assert beat_ages(job) == {job.members.get("b").rank: 0}


def test_how_long_a_rank_has_been_behind_counts_until_its_generation_is_over():
    world = World()
    join(world, "a", "b", "c")
    job = world.coordinator.jobs["job"]
    world.tick(SECOND)
    for name in ("a", "b"):
        world.clients[name].step = 5
    world.tick(SECOND)
    assert longest_behind_seconds(job) == 0
    world.tick(70 * SECOND)
    assert longest_behind_seconds(job) == 72
    world.ask("b", leave={"reason": "a bug"})
    assert longest_behind_seconds(job) == 0


def test_who_cannot_work_before_the_next_generation_waits_for_a_rendezvous():
    world = World()
    join(world, "a", size=2)
    rendezvous = world.coordinator.jobs["job"].rendezvous
    world.tick(20 * SECOND)
    assert rendezvous.longest_ns == 20 * SECOND
    join(world, "b", size=2)
    assert rendezvous.longest_ns == 0
    join(world, "a", size=2)
    world.tick(SECOND)
    assert rendezvous.longest_ns == SECOND, "it has left its generation, which goes on"


def test_a_newcomer_waits_for_no_rendezvous_while_a_generation_goes_on():
    """Spares may wait for as long as the job lasts."""
    world = World()
    join(world, "a", "b", "c")
    join(world, "spare", size=3)
    rendezvous = world.coordinator.jobs["job"].rendezvous
    world.tick(20 * SECOND)
    assert rendezvous.longest_ns == 0
    world.ask("b", leave={"reason": "a bug"})
    world.tick(SECOND)
    assert rendezvous.longest_ns == SECOND, "since that generation ended"


def test_who_asked_for_the_next_generation_before_its_own_ended_has_waited_since_then():
    world = World()
    join(world, "a", "b", "c")
    join(world, "spare", size=3)
    join(world, "a", size=3)
    world.tick(2 * SECOND)
    world.ask("b", leave={"reason": "a bug"})
    world.tick(SECOND)
    assert world.coordinator.jobs["job"].rendezvous.longest_ns == 3 * SECOND


def test_a_job_counts_its_generations_that_a_failure_ended():
    world = World()
    for _ in range(3):
        for name in ("a", "b"):
            world.hello(name)
        join(world, "a", "b")
        for name in ("a", "b"):
            world.ask(name, leave={})
    generations = world.coordinator.jobs["job"].generations
    assert (generations.newest.number, generations.broken_count) == (3, 0)
    for count in (1, 2):
        for name in ("a", "b"):
            world.hello(name)
        join(world, "a", "b")
        world.ask("a", leave={"reason": "a bug"})
        world.ask("b", leave={"reason": "its peer was lost"})
        assert generations.broken_count == count
