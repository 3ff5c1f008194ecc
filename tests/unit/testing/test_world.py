"""run_world: results in rank order, the first cause of a failure, and what the fault plan asks for."""

import asyncio
import io
import pdb
import signal
import threading

import numpy as np
import pytest

import ferrorpc
from ferrorpc import CollectiveTimeoutError, ConfigError, FerroError, InvalidRankError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import FaultPlan, Kill, VirtualClock, World, rank_threads, run_groups, run_world
from tests.waiting import eventually

both_clocks = pytest.mark.parametrize("clock", [None, SYSTEM_CLOCK], ids=["virtual", "real"])


@both_clocks
def test_results_come_in_rank_order(clock) -> None:
    assert run_world(4, lambda group: (group.rank, int(group.all_reduce(group.rank))), clock=clock) == [
        (0, 6),
        (1, 6),
        (2, 6),
        (3, 6),
    ]


@both_clocks
def test_it_returns_when_its_threads_are_gone(clock) -> None:
    """torch aborts the process if a thread frees tensors while the interpreter exits."""
    gone = []

    class Late:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __del__(self) -> None:
            threading.Event().wait(0.05)
            gone.append(self.rank)

    kept = threading.local()

    def body(group) -> None:
        kept.value = Late(group.rank)  # freed when the thread ends

    run_world(3, body, clock=clock)
    assert sorted(gone) == [0, 1, 2]


def test_it_is_part_of_the_face() -> None:
    assert ferrorpc.testing.run_world(2, lambda group: group.size) == [2, 2]


@both_clocks
def test_the_first_failure_is_raised_with_the_others_as_notes(clock) -> None:
    def body(group) -> None:
        group.barrier()
        if group.rank == 2:
            raise ValueError("the data is odd")
        group.barrier()

    with pytest.raises(ValueError, match="the data is odd") as raised:
        run_world(3, body, clock=clock)
    notes = raised.value.__notes__
    assert notes[0] == "raised on rank 2 of 3"
    assert [note.split("\n")[0] for note in notes[1:]] == [
        f"rank {rank}: PeerLostError: rank 2 was lost: ValueError: the data is odd" for rank in (0, 1)
    ]


def test_of_equal_failures_the_lowest_ranks_is_raised() -> None:
    def body(group) -> None:
        raise KeyError("same")

    for seed in range(5):
        with pytest.raises(KeyError) as raised:
            run_world(3, body, seed=seed)
        notes = [note.split(":")[0] for note in raised.value.__notes__]
        assert notes == ["raised on rank 0 of 3", "rank 1", "rank 2"]


@both_clocks
def test_exceptions_can_be_returned(clock) -> None:
    def body(group) -> str:
        if group.rank == 0:
            raise ValueError("no")
        return "fine"

    outcomes = run_world(2, body, return_exceptions=True, clock=clock)
    assert isinstance(outcomes[0], ValueError)
    assert outcomes[1] == "fine"


@both_clocks
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_any_exception_of_a_rank_is_its_failure_and_not_its_threads(clock, error: BaseException, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", pytest.fail)

    def body(group) -> None:
        if group.rank == 1:
            raise error

    with pytest.raises(type(error)) as raised:
        run_world(2, body, clock=clock)
    assert raised.value.__notes__.pop() == "raised on rank 1 of 2"


@both_clocks
@pytest.mark.parametrize("end", [KeyboardInterrupt, FerroError])
def test_ranks_end_after_ctrl_c_and_after_the_limit_of_time(clock, end: type[BaseException], monkeypatch) -> None:
    if end is FerroError:
        monkeypatch.setattr(rank_threads, "WALL_SECONDS", 1.0)
    ended = []

    def body(group) -> None:
        try:
            group.barrier()
            if end is KeyboardInterrupt and group.rank == 0:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                group.barrier()
        finally:
            ended.append(group.rank)

    with pytest.raises(end, match="still run" if end is FerroError else None):
        run_world(2, body, clock=clock)
    eventually(lambda: sorted(ended) == [0, 1])


@both_clocks
def test_so_do_ranks_that_have_gone_on_in_a_later_generation(clock, monkeypatch) -> None:
    monkeypatch.setattr(rank_threads, "WALL_SECONDS", 1.0)
    ended = []

    def body(group) -> None:
        number, clock = group.rank, group.session.clock
        try:
            while True:
                try:
                    group.all_reduce(1)
                    clock.parker().park(clock.now() + 0.01)
                except FerroError:
                    group = group.reform()
        finally:
            ended.append(number)

    plan = FaultPlan(kill={1: Kill(at_operation=5)})
    with pytest.raises(FerroError, match="still run"):
        World(3, faults=plan, min_size=1, clock=clock).run(body)
    eventually(lambda: sorted(ended) == [0, 1, 2])


@both_clocks
def test_a_rank_may_be_in_the_debugger_for_longer_than_the_limit(clock, monkeypatch) -> None:
    run_world(2, lambda group: group.all_reduce(1), clock=clock)  # what is loaded once takes its time
    monkeypatch.setattr(rank_threads, "WALL_SECONDS", 0.8)

    class Person(io.StringIO):
        def readline(self, *_: int) -> str:
            threading.Event().wait(1.8)
            return "continue\n"

    def body(group) -> None:
        if group.rank == 1:
            pdb.Pdb(stdin=Person(), stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
        return group.all_reduce(1)

    assert run_world(2, body, clock=clock) == [2, 2]


def test_what_waits_for_ever_is_an_error_that_says_where() -> None:
    def body(group) -> None:
        group.session.clock.parker().park(float("inf"))

    with pytest.raises(FerroError, match=r"no thread can run.*'rank 0' in body"):
        run_world(2, body)


def test_so_are_operations_without_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FerroError, match=r"no thread can run.*'rank 0' in .*'rank 1' in ") as raised:
        run_world(2, lambda group: group.recv(1 - group.rank, timeout=float("inf")))
    assert len(str(raised.value)) < 1_000
    assert len(caplog.records) < 50


def test_what_goes_wrong_when_a_rank_closes_its_group_is_its_failure() -> None:
    class Stubborn:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            raise FerroError("it does not close")

    with pytest.raises(FerroError, match="it does not close") as raised:
        run_groups([Stubborn()], lambda group: 7)  # type: ignore[list-item]
    assert raised.value.__notes__ == ["raised on rank 0 of 1"]


@both_clocks
def test_a_world_runs_once(clock) -> None:
    world = World(2, clock=clock)
    assert world.run(lambda group: group.rank) == [0, 1]
    with pytest.raises(UsageError, match="has already had its run"):
        world.run(lambda group: group.rank)


def test_a_world_of_no_groups_has_no_results() -> None:
    assert run_groups([], lambda group: 7) == []


def test_ranks_that_still_run_are_named_with_where_they_are(monkeypatch) -> None:
    monkeypatch.setattr(rank_threads, "WALL_SECONDS", 1.0)
    go_on = threading.Event()

    def stuck_elsewhere(group) -> None:
        if group.rank == 1:
            go_on.wait(60)

    with pytest.raises(
        FerroError, match=r"1 of 3 ranks still run after 1 s: 'rank 1' in stuck_elsewhere \(test_world"
    ) as raised:
        run_world(3, stuck_elsewhere, clock=SYSTEM_CLOCK)
    go_on.set()
    assert "report this" not in str(raised.value)


def test_so_are_the_threads_that_work_for_them(monkeypatch) -> None:
    monkeypatch.setattr(rank_threads, "WALL_SECONDS", 1.0)
    go_on = threading.Event()

    def helped(group) -> None:
        helper = threading.Thread(target=go_on.wait, args=(60,), name="helper", daemon=True)
        helper.start()
        helper.join(60)

    with pytest.raises(FerroError, match="1 of 1 ranks still run") as raised:
        run_world(1, helped, clock=SYSTEM_CLOCK)
    go_on.set()
    assert any(note.startswith("thread 'helper' is in ") for note in raised.value.__notes__)


@pytest.mark.parametrize("seed", [None, "a", 1.5])
def test_a_seed_that_is_no_whole_number_is_refused(seed) -> None:
    for make in (
        VirtualClock,
        lambda seed: ferrorpc.SimulatedBackend.create_group(2, seed=seed),
        lambda seed: World(2, seed=seed),
    ):
        with pytest.raises(UsageError, match=f"seed={seed!r} is no whole number"):
            make(seed)


def test_faults_and_seed_may_be_given_by_place() -> None:
    assert ferrorpc.testing.run_world(2, lambda group: group.size, None, 7) == [2, 2]


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", None, True])
def test_a_world_has_a_whole_number_of_ranks(size) -> None:
    for make in (ferrorpc.SimulatedBackend.create_group, World, lambda count: run_world(count, lambda group: group.size)):
        with pytest.raises(ferrorpc.InvalidWorldSizeError):
            make(size)


def test_a_backend_itself_knows_its_ranks() -> None:
    first, second = ferrorpc.SimulatedBackend.create_group(2)
    for peer in (-1, 2):
        with pytest.raises(InvalidRankError, match="ranks 0 to 1"):
            first.send(np.zeros(1), peer)
        with pytest.raises(InvalidRankError, match="ranks 0 to 1"):
            second.recv(peer, timeout=1.0)


@pytest.mark.parametrize("wrong", ["text", np.array(["text"]), np.zeros(2, ">f4"), [1, "a"]], ids=repr)
def test_what_the_root_could_not_send_is_refused_on_every_rank(wrong) -> None:
    def body(group) -> int:
        with pytest.raises(UsageError):
            group.broadcast(wrong)
        return int(group.all_reduce(1))

    assert run_world(2, body) == [2, 2]


@both_clocks
def test_works_are_awaited_in_it_beside_each_other(clock) -> None:
    async def ring(group) -> list[int]:
        async def receive() -> int:
            return int(await group.recv((group.rank - 1) % group.size, async_op=True))

        async def send() -> None:
            await asyncio.sleep(0)
            await group.all_reduce(1, async_op=True)
            await group.send(group.rank, (group.rank + 1) % group.size, async_op=True)

        received, _, total = await asyncio.gather(receive(), send(), group.all_reduce(group.rank, async_op=True))
        return [received, int(total)]

    assert run_world(3, lambda group: asyncio.run(ring(group)), clock=clock) == [[2, 3], [0, 3], [1, 3]]


def test_who_awaits_for_ever_is_told_at_the_operations_deadline() -> None:
    async def lonely(group) -> object:
        return await group.recv(1 - group.rank, async_op=True)

    results = run_world(2, lambda group: asyncio.run(lonely(group)), return_exceptions=True)
    assert [type(result) for result in results].count(CollectiveTimeoutError) >= 1


POLLS = {
    "work": lambda group, work: work.done(),
    "keys": lambda group, work: bool(group.store.keys("late")),
    "number": lambda group, work: group.store.add("late", 0) == 1,
    "value": lambda group, work: group.store.get("number") == b"2",
    "deletion": lambda group, work: group.store.delete("late"),
    "exchange": lambda group, work: group.store.compare_set("number", b"2", b"3"),
}
"""What a rank may ask for again and again until another rank has come so far."""


@both_clocks
@pytest.mark.parametrize("asked", POLLS)
def test_a_loop_that_asks_lets_the_others_go_on(asked: str, clock) -> None:
    def body(group: ferrorpc.ProcessGroup) -> bool:
        if group.rank == 0:
            group.store.set("number", b"1")
        group.barrier()
        if group.rank == 1:
            group.session.clock.parker().park(group.session.clock.now() + 0.2)
            group.store.add("late")
            group.store.add("number")
        work = group.all_reduce(np.ones(3), async_op=True)
        while group.rank == 0 and not POLLS[asked](group, work):
            pass
        return bool(work.wait()[0] == 2)

    assert run_world(2, body, clock=clock) == [True, True]


def test_what_is_no_clock_is_refused() -> None:
    with pytest.raises(ConfigError, match="clock='virtual' is no clock"):
        run_world(2, lambda group: group.rank, clock="virtual")  # type: ignore[call-overload]
