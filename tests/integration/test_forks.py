"""Processes that members fork: data loaders work, and what a child holds open does not keep its parent alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.launching import environment, run, write_script


def test_a_data_loader_that_forks_works_between_operations(tmp_path: Path) -> None:
    body = """
    import multiprocessing
    import numpy
    import ferrorpc

    def load(index):
        return numpy.full(1000, float(index))

    with ferrorpc.init_process_group() as group:
        assert float(group.all_reduce(1.0)) == 2.0
        for epoch in range(3):
            with multiprocessing.get_context("fork").Pool(3) as loader:
                batches = loader.map(load, range(group.rank, 24, group.size))
            total = group.all_reduce(sum(batches))
            assert total.tolist() == [276.0] * 1000
        print("trained", flush=True)
    """
    result = run("-n", "2", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0: trained", "1: trained"]


def test_a_child_of_a_member_is_refused_a_seat_of_its_own_at_once(tmp_path: Path) -> None:
    body = """
    import os
    import sys
    import ferrorpc

    def child_is_refused(call, **arguments):
        child = os.fork()
        if child == 0:
            try:
                call(**arguments)
            except ferrorpc.UsageError as error:
                advice = "spawn" in error.hint and "without a launcher's variables" in error.hint
                os._exit(7 if "forked" in error.message and advice else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    with ferrorpc.init_process_group() as group:
        child_is_refused(ferrorpc.init_process_group, job="another", world_size=1)
        child_is_refused(group.barrier)
        group.barrier()
    child_is_refused(ferrorpc.init_process_group)
    """
    result = run("-n", "2", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr


def test_a_child_of_a_world_without_a_coordinator_uses_its_group_and_makes_one_of_its_own(tmp_path: Path) -> None:
    body = """
    import os
    import ferrorpc

    def in_child(call):
        child = os.fork()
        if child == 0:
            os._exit(7 if float(call().all_reduce(1.0)) == 1.0 else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    with ferrorpc.init_process_group() as group:
        in_child(lambda: group)
    in_child(ferrorpc.init_process_group)
    """
    script = write_script(tmp_path, body)
    done = subprocess.run([sys.executable, script], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_main_guard_is_told_that_its_helpers_import_it(tmp_path: Path, method: str) -> None:
    """Such a helper asked for its parent's place, was refused it for 15 s, and heard of a name that is used twice."""
    body = f"""
    import multiprocessing
    import ferrorpc

    group = ferrorpc.init_process_group(timeout=15)
    helper = multiprocessing.get_context("{method}").Process(target=print)
    helper.start()
    helper.join()
    """
    result = run("-n", "1", write_script(tmp_path, body))
    assert "is still being started by multiprocessing" in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr


def test_ranks_that_a_script_spawns_itself_under_the_launcher_are_told_that_it_starts_them(tmp_path: Path) -> None:
    """Each waited for the other's place, and all trained the whole model one after the other."""
    body = """
    import multiprocessing
    import ferrorpc

    def train():
        with ferrorpc.init_process_group(timeout=30) as group:
            print("spawned", group.size, flush=True)

    if __name__ == "__main__":
        spawned = [multiprocessing.get_context("spawn").Process(target=train) for _ in range(2)]
        for each in spawned:
            each.start()
        for each in spawned:
            each.join()
    """
    result = run("-n", "1", write_script(tmp_path, body))
    assert result.stdout.count("spawned 1") == 2
    assert result.stderr.count("`ferrorpc run -n N` starts N processes itself") == 2


def test_a_subprocess_that_has_a_ranks_variables_is_told_to_do_without_them(tmp_path: Path) -> None:
    body = """
    import subprocess
    import sys
    import ferrorpc

    with ferrorpc.init_process_group(timeout=30.0 if len(sys.argv) == 1 else 1.0) as group:
        subprocess.run([sys.executable, __file__, "evaluate"])
    """
    result = run("-n", "1", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert "is used by a living process" in result.stderr
    assert "such as a rank's subprocess, without the launcher's variables" in result.stderr


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_what_a_child_does_with_its_parents_group_ends_nothing(tmp_path: Path, transport: str) -> None:
    body = f"""
    import os
    import sys
    import ferrorpc

    with ferrorpc.init_process_group(transport="{transport}") as group:
        assert float(group.all_reduce(1.0)) == 2.0
        for end in ("exit", "close", "raise"):
            child = os.fork()
            if child == 0:
                if end == "exit":
                    sys.exit(7)
                if end == "close":
                    group.close()
                    os._exit(7)
                raise SystemExit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, end
            group.barrier()
            assert float(group.all_reduce(1.0)) == 2.0, end
        print("went on", flush=True)
    """
    result = run("-n", "2", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0: went on", "1: went on"]


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_a_child_that_waits_for_its_parents_operations_is_told_at_once(tmp_path: Path, transport: str) -> None:
    """It waited for ever for threads that only its parent has."""
    body = f"""
    import os
    import signal
    import ferrorpc

    group = ferrorpc.init_process_group(transport="{transport}", timeout=60)
    subgroup = group.subgroup([1, 0])
    waiting = [each.recv(1 - each.rank, 7, async_op=True) for each in (group, subgroup)]
    if group.rank == 0:
        waiting.append(group.all_reduce(1.0, async_op=True))
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for call in (*(work.wait for work in waiting), group.synchronize, subgroup.synchronize, lambda: group.empty(3)):
                try:
                    call()
                    os._exit(3)
                except ferrorpc.UsageError as error:
                    if "forked from a member" not in error.message:
                        os._exit(4)
            group.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        group.store.set("forked", b"")
        assert float(waiting.pop().wait()) == 2.0
    else:
        group.store.get("forked")
        group.all_reduce(1.0)
    for each in (group, subgroup):
        each.send(1.0, 1 - each.rank, 7)
    print(*(float(work.wait()) for work in waiting), flush=True)
    group.close()
    """
    result = run("-n", "2", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0: 1.0 1.0", "1: 1.0 1.0"]


DIES_BESIDE_A_CHILD = """
import os, signal, sys, time
import ferrorpc

group = ferrorpc.init_process_group()
group.all_reduce(1.0)
if group.rank == 1:
    if os.fork() == 0:  # like the worker of a data loader: it has every socket of its parent, and outlives it
        print("child", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    group.store.set("died", str(time.monotonic()).encode())
    os.kill(os.getpid(), signal.SIGKILL)
died = float(group.store.get("died"))  # of the clock of the machine, which all its processes share
try:
    group.all_reduce(1.0, timeout=90)
except ferrorpc.PeerLostError as error:
    print(error.rank, time.monotonic() - died, flush=True)
"""


def test_a_child_that_keeps_the_sockets_of_a_dead_member_delays_the_news_by_no_more_than_a_lease(tmp_path: Path) -> None:
    service = CoordinatorProcess()
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", DIES_BESIDE_A_CHILD],
                env=environment() | {"FERRORPC_COORDINATOR": service.address, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        assert ranks[1].stdout is not None
        child = int(ranks[1].stdout.readline().split()[1])
        output, _ = ranks[0].communicate(timeout=100)
        subprocess.run(["kill", "-9", str(child)], check=True)
        ranks[1].communicate(timeout=10)
        lost, seconds = output.split()
        assert int(lost) == 1
        assert float(seconds) < 4.0 + 10.0, "a lease and a second, and what a busy machine takes; the child lives for 60 s"
    finally:
        service.stop()


def test_under_the_launcher_such_a_child_delays_nothing(tmp_path: Path) -> None:
    without_report = {"FERRORPC_GRACE": "60", "FERRORPC_LEASE": "60"}  # the news would take so long without the launcher's
    result = run("-n", "2", write_script(tmp_path, DIES_BESIDE_A_CHILD), timeout=100, **without_report)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("0: ")]
    _, lost, seconds = line.split()
    assert int(lost) == 1
    assert float(seconds) < 20.0
