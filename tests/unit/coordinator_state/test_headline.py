"""A job's headline, and which ranks are behind."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.behind import behind
from ferrorpc_coordinator.state.generations import Generation, before_the_first
from ferrorpc_coordinator.state.headline import headline
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.v1.rendezvous_pb2 import WorldPolicy
from ferrorpc.v1.session_pb2 import BarrierStatus
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join

NOW = 100 * SECOND
GOING_ON = Generation(1, (), WorldPolicy(), "3 of 3 joined")


def ranks(*steps: int, age: float = 13.0, liveness: Liveness = Liveness.PRESENT) -> list[Member]:
    """Members by rank, whose steps have not advanced for `age` seconds."""
    return [
        Member(
            name=f"w{rank}", incarnation=1, instance_id="", token_hash=b"", lease_ns=SECOND, host="h", rank=rank, step=step,
            step_since=NOW - round(age * SECOND), activity="all_reduce #20", liveness=liveness, waits=False,
            waits_changed=NOW - round(age * SECOND),
        )
        for rank, step in enumerate(steps)
    ]  # fmt: skip


def shown(
    members: list[Member], newest: Generation = GOING_ON, barriers: tuple[BarrierStatus, ...] = (), waiting: str = ""
) -> tuple[str, ...]:
    found = headline(members, behind(members, {}, NOW), newest, barriers, waiting, 0)
    return found.level, found.title, *found.details


def ended(why: str) -> Generation:
    return Generation(1, (), WorldPolicy(), "", end_reason=why)


def test_of_a_job_that_is_well() -> None:
    assert shown(ranks(5, 5)) == ("good", "All 2 ranks work")
    assert shown(ranks(5), waiting="1 of 2 joined") == ("good", "The one rank works", "Next round: 1 of 2 joined")
    members = ranks(5, 5, 5)
    members[1].liveness = Liveness.LEFT
    assert shown(members) == ("good", "2 of 3 ranks work, 1 left")


def test_of_a_job_that_has_not_begun_or_is_over() -> None:
    assert shown([], before_the_first()) == ("idle", "Nobody has joined yet")
    spare = ranks(0)
    spare[0].rank = -1
    assert shown(spare, before_the_first(), waiting="1 of 2 joined") == (
        "idle",
        "The first round is still open",
        "Next round: 1 of 2 joined",
    )
    spare[0].liveness = Liveness.LEFT
    assert shown(spare, before_the_first()) == ("idle", "No round was completed, and nobody is left")
    over = ranks(5, 5, liveness=Liveness.LEFT)
    assert shown(over, ended("all its members left")) == ("idle", "The job is over: all its members left")


def test_a_title_ends_at_a_colon_outside_of_parentheses() -> None:
    why = "after 12 s, all_reduce(op=sum, float32[1]) #2 waits for rank 2 (not there yet: last entered send #1); rank 2: active"
    title, *details = shown(ranks(5, 5), ended(why))[1:]
    assert title == why[:1].upper() + why[1:].removesuffix(": active")
    assert details[0] == "active"


def test_of_a_generation_that_was_broken() -> None:
    lost = ended("rank 1 (w1 on h) was lost: SIGKILL: at once")
    expected = ("bad", "Rank 1 (w1 on h) was lost", "SIGKILL: at once", "generation 1 is over", "Next round: 1 of 2 joined")
    assert shown(ranks(5, 5), lost, waiting="1 of 2 joined") == expected


def test_of_ranks_that_are_silent() -> None:
    members = ranks(5, 5, 5)
    members[1].liveness, members[1].reason = Liveness.STALLED, "no beat\nfor 4.2 s"
    assert shown(members) == ("warn", "Rank 1 is stalled", r"no beat\nfor 4.2 s")
    members[2].liveness = Liveness.SUSPECT
    assert shown(members)[1] == "Rank 1 is stalled, and 1 more"


def test_of_ranks_that_are_missing_at_a_barrier() -> None:
    def barrier(*missing: int, age_ms: int = 1500) -> BarrierStatus:
        return BarrierStatus(name="epoch", generation=1, missing_ranks=missing, age_ms=age_ms)

    told = ("rank 1 on h was last seen in all_reduce #20", "rank 2 on h was last seen in all_reduce #20")
    expected = ("warn", "Barrier epoch has waited 1.5 s for rank 1", told[0])
    assert shown(ranks(5, 5, 5), barriers=(barrier(), barrier(1))) == expected
    expected = ("warn", "Barrier epoch has waited 1.5 s for 2 ranks", *told)
    assert shown(ranks(5, 5, 5), barriers=(barrier(1, 2),)) == expected
    assert shown(ranks(5, 5, 5), barriers=(barrier(1, age_ms=1000),)) == ("good", "All 3 ranks work")


def test_of_ranks_that_wait_for_another_generation_while_theirs_goes_on() -> None:
    world = World()
    join(world, "a", "b", "c")
    world.ask("c", leave={})
    join(world, "a", "b", size=3)
    job = world.coordinator.jobs["job"]
    world.tick(5 * SECOND)
    assert job.status().headline.level == "good"
    world.tick(7 * SECOND)
    told = job.status().headline
    assert (told.level, told.title) == ("warn", "A rank has waited 12 s for the next generation")
    assert [detail[:21] for detail in told.details] == ["Next round: 2 of 3 me"]


def test_of_ranks_that_are_behind() -> None:
    members = ranks(21, 20, 20)
    members[1].waits_changed += SECOND
    told = [f"rank {rank} on h is at step 20, its last operation: all_reduce #20" for rank in (2, 1)]
    others = "others are at step 21, and perhaps wait"
    assert shown(members) == ("warn", "2 ranks have been behind for 13 s", others, *told)
    members[2].step = 21
    assert shown(members) == ("warn", "Rank 1 has been behind for 12 s", others, told[1])
    for member, seconds in ((members[0], 8), (members[2], 7)):
        member.waits, member.waits_changed = True, NOW - seconds * SECOND
    assert shown(members) == ("warn", "Rank 1 has been behind for 7 s", "others wait", told[1])


@pytest.mark.parametrize(
    ("steps", "seconds", "liveness", "late", "level"),
    [
        ((21, 20, 21), (13.0, 13.0, 13.0), Liveness.PRESENT, 13.0, "warn"),  # all stand: the others wait for rank 1
        ((21, 20, 21), (0.01, 13.0, 0.01), Liveness.PRESENT, 13.0, "warn"),
        ((21, 20, 21), (3.0, 3.0, 3.0), Liveness.PRESENT, 3.0, "good"),  # shown, but not yet worth an alarm
        ((21, 20, 21), (2.0, 2.0, 2.0), Liveness.PRESENT, None, "good"),
        ((21, 21, 21), (13.0, 13.0, 13.0), Liveness.PRESENT, None, "good"),  # all compute
        ((900, 450, 900), (13.0, 13.0, 13.0), Liveness.PRESENT, None, "good"),  # a pipeline whose stages all compute
        ((900, 450, 900), (0.01, 13.0, 13.0), Liveness.PRESENT, None, "good"),  # who goes on does not wait for it
        ((900, 450, 900), (8.0, 13.0, 9.0), Liveness.PRESENT, 8.0, "warn"),  # it stopped, and then those that wait for it
        ((900, 450, 900), (3.0, 13.0, 4.0), Liveness.PRESENT, 3.0, "good"),
        ((21, 20, 21), (13.0, 13.0, 13.0), Liveness.LEFT, None, "good"),  # nobody waits for those who said goodbye
    ],
)
def test_who_is_behind(
    steps: tuple[int, ...], seconds: tuple[float, ...], liveness: Liveness, late: float | None, level: str
) -> None:
    members = ranks(*steps, liveness=liveness)
    for member, age in zip(members, seconds, strict=True):
        member.step_since = member.waits_changed = NOW - round(age * SECOND)
    assert behind(members, {}, NOW).durations == ({} if late is None else {"w1": late * SECOND})
    assert shown(members)[0] == level


def test_nobody_is_behind_where_nobody_has_a_rank() -> None:
    assert behind([], {}, NOW).durations == {}
