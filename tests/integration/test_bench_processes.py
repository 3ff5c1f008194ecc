"""The rank processes of measurements: errors quote the system's own output, and no process is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import compare, link
from ferrorpc.cli.bench import machine
from ferrorpc.cli.bench.case import ALL_REDUCE, BARRIER, SEND, Case, Contender, System
from ferrorpc.cli.bench.comparison import Comparison
from ferrorpc.cli.bench.rank_processes import RankProcesses
from ferrorpc.errors import BackendUnavailableError, CollectiveTimeoutError, PeerLostError
from tests.integration.launching import wait_until_gone
from tests.waiting import eventually

SUM = Case(ALL_REDUCE, 2, 4096)


def calm(fault=""):
    return System(f"calm {fault}".strip(), "tests.integration.bench_runners:Calm", {"fault": fault})


def test_ranks_are_measured_and_end():
    with RankProcesses(calm(), 2) as world:
        assert world.version == "calm 1"
        low, high = world.prepare(SUM, Contender(calm()))
        assert low == 1 < high
        world.ask("verify")
        first, second = world.ask("turn", warm_ups=1, blocks=4, count=3)
        assert len(first["seconds"]) == len(second["seconds"]) == 4
        assert all(seconds > 0 for seconds in first["seconds"])
        assert first["turn_cpu_seconds"] > first["cpu_seconds"] > 0
        pids = world.process_ids
        assert len(set(pids)) == 2
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    ("system", "case"),
    [
        (link.SOCKETS, SUM),
        (compare.PROTOBUF_STREAM, Case(SEND, 2, 4096)),
        (compare.FLIGHT, Case(SEND, 2, 4096)),
        (compare.tensor_system("grpc"), SUM),
    ],
    ids=lambda each: each.name if isinstance(each, System) else "",
)
def test_the_systems_that_benchmarks_add_are_measured(system, case):
    for module in system.needs:
        pytest.importorskip(module)
    with RankProcesses(system, 2) as world:
        world.prepare(case, Contender(system))
        world.ask("verify")


def test_waiting_ranks_use_no_processor():
    with RankProcesses(calm(), 2) as world:
        before = world.ask("usage")
        time.sleep(0.5)
        after = world.ask("usage")
    assert all(now["cpu_seconds"] - then["cpu_seconds"] < 0.05 for now, then in zip(after, before, strict=True))


def test_a_pinned_rank_has_one_processor():
    with RankProcesses(calm(), 2, pin=True) as world:
        allowed = [os.sched_getaffinity(pid) for pid in world.process_ids]
    available = sorted(os.sched_getaffinity(0))
    assert allowed == [{available[0]}, {available[1 % len(available)]}]


def test_a_system_that_does_not_start_says_why():
    with pytest.raises(BackendUnavailableError, match="calm absent did not start: calm is not at home"):
        RankProcesses(calm("absent"), 2)


def test_a_module_that_is_not_installed_is_named():
    with pytest.raises(BackendUnavailableError, match="no_such_module is not installed"):
        RankProcesses(System("absent", "x:Y", needs=("no_such_module",)), 2)


def test_what_every_rank_refuses_leaves_the_world_as_it_was():
    with RankProcesses(calm("unable"), 2) as world:
        with pytest.raises(BackendUnavailableError, match="calm has no sums"):
            world.prepare(SUM, Contender(calm("unable")))
        assert world.prepare(Case(BARRIER), Contender(calm("unable"))) == (1, 1000)


def test_a_rank_that_dies_is_lost():
    with RankProcesses(calm("dies"), 2) as world:
        world.prepare(SUM, Contender(calm()))
        with pytest.raises(PeerLostError, match="rank 1 of calm dies failed: its process ended") as raised:
            world.ask("turn", warm_ups=0, blocks=1, count=1)
        assert raised.value.rank == 1
        pids = world.process_ids
    assert wait_until_gone(pids) == []


def test_a_rank_that_dies_before_it_reads_its_command_is_lost():
    with RankProcesses(calm(), 2) as world:
        os.kill(world.process_ids[1], signal.SIGSTOP)
        threading.Timer(0.1, os.kill, (world.process_ids[1], signal.SIGKILL)).start()
        with pytest.raises(PeerLostError, match="rank 1 of calm failed: its process ended"):
            world.ask("usage")


def test_a_rank_that_dies_in_the_middle_of_its_reply_is_lost():
    with RankProcesses(calm("mutters"), 2) as world:
        world.prepare(SUM, Contender(calm()))
        with pytest.raises(PeerLostError, match="rank 1 of calm mutters failed: its process ended"):
            world.ask("turn", warm_ups=0, blocks=1, count=1)


def test_a_rank_that_dies_before_it_is_ready_did_not_start():
    """Nobody knows its rank yet. On a busy machine it may be gone before the other has connected."""
    end = "calm stillborn did not start: a rank (failed: its process ended|ended with code -9)"
    with pytest.raises(BackendUnavailableError, match=end):
        RankProcesses(calm("stillborn"), 2)


def test_a_rank_that_does_not_answer_is_named():
    with RankProcesses(calm("hangs"), 2) as world:
        world.prepare(SUM, Contender(calm()))
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] of calm hangs did not reply in time"):
            world.ask("turn", warm_ups=0, blocks=1, count=1, deadline_seconds=0.3)
        pids = world.process_ids
    assert wait_until_gone(pids) == []


DRIVER = """
from ferrorpc.cli.bench.case import ALL_REDUCE, Case, Contender
from ferrorpc.cli.bench.rank_processes import RankProcesses
from tests.integration.test_bench_processes import calm
with RankProcesses(calm("hangs"), 2) as world:
    world.prepare(Case(ALL_REDUCE, 2, 4096), Contender(calm()))
    print(*world.process_ids, flush=True)
    world.ask("turn", warm_ups=0, blocks=1, count=1)
"""


def test_ranks_end_with_a_driver_that_is_killed_in_the_middle_of_their_turn_and_leave_no_files(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment) as driver:
        ranks = [int(word) for word in driver.stdout.readline().split()]
        driver.kill()
    assert len(ranks) == 2
    assert wait_until_gone(ranks) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_driver_that_is_stopped_while_ranks_start_leaves_no_files(number, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as driver:
        eventually(lambda: list(tmp_path.glob("*/driver")), "the socket that ranks connect to")
        driver.send_signal(number)
        driver.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_sum_on_one_rank_is_an_error_and_no_figure():
    contenders = [Contender(calm()), Contender(calm("wrong"))]
    notes = []
    comparison = Comparison(seconds=0.01, rounds=2, note=notes.append)
    row = comparison.run([SUM], contenders)[0]
    assert row["results"]["calm"]["blocks"] >= 6
    assert "rank 1 of calm wrong failed: " in row["results"]["calm wrong"]["skipped"]
    assert "values are wrong" in row["results"]["calm wrong"]["skipped"]
    assert comparison.versions == {"calm": "calm 1", "calm wrong": "calm 1"}
    assert notes[0] == SUM.title


def test_processor_time_of_the_machine_goes_on():
    before = machine.busy_seconds()
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert machine.busy_seconds() - before >= 0.08
