"""What a fault plan asks for: deaths and pauses, by the ranks of the start."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc import CollectiveTimeoutError, ConfigError, InvalidRankError, PeerLostError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import FaultPlan, Kill, Pause, RankKilled, World, run_world

both_clocks = pytest.mark.parametrize("clock", [None, SYSTEM_CLOCK], ids=["virtual", "real"])


def test_a_rank_killed_at_a_time_unwinds_and_the_others_learn_who() -> None:
    unwound = []

    def body(group):
        clock = group.session.clock
        try:
            clock.parker().park(1.0)
            group.all_reduce(np.ones(3))
            clock.parker().park(9.0)
            return group.all_reduce(np.ones(3))
        finally:
            unwound.append((group.rank, clock.now()))

    outcomes = run_world(3, body, faults=FaultPlan(kill={1: 5.0}), return_exceptions=True)
    assert isinstance(outcomes[1], RankKilled)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerLostError)
        assert (outcomes[rank].rank, outcomes[rank].reason) == (1, "killed by the fault plan")
    assert (1, 5.0) in unwound


def test_a_rank_killed_at_an_operation_does_not_begin_it() -> None:
    def body(group):
        done = []
        for item in range(4):
            try:
                group.barrier()
            except PeerLostError as error:
                return done, error.rank, error.reason
            done.append(item)
        return done, None, None

    faults = FaultPlan(delay_seconds=(0.0, 0.01), kill={2: Kill(at_operation=3, reason="signal 9")})
    outcomes = run_world(3, body, faults=faults)
    assert outcomes[:2] == [([0, 1], 2, "signal 9")] * 2
    assert isinstance(outcomes[2], RankKilled)


@both_clocks
def test_a_kill_that_was_asked_for_is_no_failure(clock) -> None:
    def body(group) -> str:
        try:
            for _ in range(1000):
                group.barrier()
                group.session.clock.parker().park(group.session.clock.now() + 0.01)
        except PeerLostError as error:
            return error.reason
        return "nobody died"

    outcomes = run_world(2, body, faults=FaultPlan(kill={1: 0.1}), clock=clock)
    assert outcomes[0] == "killed by the fault plan"
    assert isinstance(outcomes[1], RankKilled)


def test_a_paused_rank_is_late_and_a_timeout_names_it() -> None:
    def body(group) -> float:
        group.session.clock.parker().park(1.0)
        group.barrier()
        return group.session.clock.now()

    assert run_world(2, body, faults=FaultPlan(pause={0: Pause(0.5, 20.0)})) == [20.5, 20.5]
    outcomes = run_world(2, body, faults=FaultPlan(pause={0: Pause(0.5, 100.0)}), timeout=5.0, return_exceptions=True)
    assert isinstance(outcomes[1], CollectiveTimeoutError)
    assert outcomes[1].waiting_on == [0]


@pytest.mark.parametrize("end", [1.0, Kill(at_seconds=1.0, at_operation=2), Kill(at_seconds=2.5, at_operation=1)])
def test_a_new_member_takes_the_place_of_a_dead_one(end: float | Kill) -> None:
    world = World(3, faults=FaultPlan(kill={1: end}))
    joined = []

    def replacement() -> None:
        group = world.join(30.0)
        joined.append((group.rank, group.generation, int(group.all_reduce(10))))
        for _ in range(3):
            group.barrier()
        world.clock.parker().park(world.clock.now() + 1.0)
        group.barrier()

    def body(group):
        world.clock.parker().park(2.0)
        if group.rank == 0:
            world.clock.start(replacement, "replacement")
        with pytest.raises(PeerLostError):
            group.barrier()
        with group.reform(30.0) as renewed:
            total = int(renewed.all_reduce(1))
            for _ in range(3):
                renewed.barrier()
            world.clock.parker().park(world.clock.now() + 1.0)
            renewed.barrier()
            return renewed.rank, renewed.size, renewed.generation, total

    outcomes = world.run(body)
    assert outcomes[0] == (0, 3, 2, 12)
    assert outcomes[2] == (2, 3, 2, 12)
    assert joined == [(1, 2, 12)]


def through_deaths(group: ferrorpc.ProcessGroup) -> tuple[int, int]:
    """Goes on after each death. Returns rank and size at the end."""
    clock = group.session.clock
    while True:
        try:
            for _ in range(40):
                group.all_reduce(1)
                clock.parker().park(clock.now() + 0.25)
            return group.rank, group.size
        except PeerLostError:
            group = group.reform()


SECOND, NINTH = Kill(at_operation=2), Kill(at_operation=9)


@pytest.mark.parametrize("kill", [{0: SECOND, 1: NINTH}, {1: SECOND, 3: NINTH}, {0: 1.0, 1: 5.0}, {2: 1.0, 3: 5.0}])
def test_who_is_killed_is_a_rank_of_the_start_in_later_generations_too(kill: dict[int, Kill | float]) -> None:
    results = World(4, faults=FaultPlan(kill=kill), min_size=1).run(through_deaths)
    assert {rank for rank, result in enumerate(results) if isinstance(result, RankKilled)} == kill.keys()
    assert sorted(results[rank] for rank in {0, 1, 2, 3} - kill.keys()) == [(0, 2), (1, 2)]


def test_so_is_who_pauses() -> None:
    rested = list[tuple[int, float]]()

    def body(group: ferrorpc.ProcessGroup) -> None:
        number, clock = group.rank, group.session.clock
        try:
            group.barrier()
        except PeerLostError:
            group = group.reform()
        clock.parker().park(2.0)
        rested.append((number, clock.now()))

    plan = FaultPlan(kill={0: Kill(at_operation=1)}, pause={2: Pause(1.0, 5.0)})
    World(3, faults=plan, min_size=1).run(body)
    assert rested == [(1, 2.0), (2, 6.0)]


def test_a_plan_holds_whatever_was_started_before_the_ranks() -> None:
    world = World(2, faults=FaultPlan(pause={0: Pause(1.0, 5.0)}))
    rested = list[tuple[str, float]]()

    def rest(name: str) -> None:
        world.clock.parker().park(2.0)
        rested.append((name, world.clock.now()))

    world.clock.start(lambda: rest("helper"), "helper")
    world.run(lambda group: rest(f"rank {group.rank}"))
    assert sorted(rested) == [("helper", 2.0), ("rank 0", 6.0), ("rank 1", 2.0)]


INFINITE = float("inf")
NAN = float("nan")


@pytest.mark.parametrize("delay", [(2.0, 1.0), (-1.0, 1.0), (0.0, INFINITE), (0.0, NAN), 0.5, (1.0,), ("a", "b")])
def test_delays_that_are_no_range_of_seconds_are_refused(delay) -> None:
    with pytest.raises(ConfigError, match="is no range of seconds"):
        FaultPlan(delay_seconds=delay)


def test_faults_that_could_never_happen_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at_seconds or at_operation\ntry: .*Kill\(at_seconds=2\.5\)"):
        Kill()
    for operation in (0, -1, 1.5, "3", True):
        with pytest.raises(ConfigError, match="counted from 1"):
            Kill(at_operation=operation)
    ways: tuple[Callable[[Any], object], ...] = (
        lambda seconds: Kill(at_seconds=seconds),
        lambda seconds: FaultPlan(kill={0: seconds}),
        lambda seconds: Pause(seconds, 1.0),
        lambda seconds: Pause(1.0, seconds),
    )
    for make in ways:
        for seconds in (-1.0, INFINITE, NAN, "soon", np.float32(-1)):
            with pytest.raises(ConfigError, match="is no number of seconds"):
                make(seconds)
    for plan in (FaultPlan(kill={2: 1.0}), FaultPlan(pause={2: Pause(0.0, 1.0)})):
        with pytest.raises(InvalidRankError):
            run_world(2, lambda group: None, faults=plan)
    with pytest.raises(UsageError, match="virtual"):
        run_world(2, lambda group: None, faults=FaultPlan(pause={0: Pause(0.0, 1.0)}), clock=SYSTEM_CLOCK)


def test_faults_and_seeds_may_be_drawn_by_numpy() -> None:
    random = np.random.default_rng(0)
    kills = {np.int64(1): Kill(at_operation=random.integers(3, 4)), 2: Kill(at_seconds=np.float32(60))}
    plan = FaultPlan((np.float64(0), np.float32(0.25)), kills, {0: Pause(np.int32(0), np.float32(1))})

    def body(group):
        for _ in range(50):
            group.barrier()

    worlds = [World(3, faults=plan, seed=seed, min_size=np.int64(1)) for seed in (3, np.int64(3), np.int64(4))]
    for world in worlds:
        assert isinstance(world.run(body, return_exceptions=True)[1], RankKilled)
    traces = [world.clock.trace for world in worlds]
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FaultPlan(kill=[1]),
        lambda: FaultPlan(kill=None),
        lambda: FaultPlan(pause=None),
        lambda: FaultPlan(pause={0: 1.0}),
        lambda: FaultPlan(kill={"0": 1.0}),
        lambda: FaultPlan(kill={0: Pause(1.0, 1.0)}),
        lambda: World(2, faults={"kill": {1: 1.0}}),
    ],
)
def test_what_is_no_plan_of_faults_is_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()
