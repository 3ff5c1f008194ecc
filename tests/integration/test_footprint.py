"""What a group costs a process that does not use it, or uses it for long: processor time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launching import run, write_script

IDLE = """
import time
import ferrorpc

with ferrorpc.init_process_group(transport={transport!r}) as group:
    group.all_reduce(1.0)
    group.all_reduce(1.0, algorithm="ring")
    if group.rank:
        group.send(1.0, 0)
    else:
        [group.recv(rank) for rank in range(1, group.size)]
    time.sleep(1.0)
    began, used = time.monotonic(), time.process_time()
    time.sleep(2.0)
    print((time.process_time() - used) / (time.monotonic() - began), flush=True)
    group.barrier()
"""

BUSY = """
import gc
import numpy
import ferrorpc

def resident_bytes():
    gc.collect()
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

with ferrorpc.init_process_group(transport="shared_memory") as group:
    peer = 1 - group.rank
    small, middle = numpy.ones(16, numpy.float32), numpy.ones(25_000, numpy.float32)
    registered = group.empty(25_000)

    def turn():
        for x in (small, middle):
            work = group.send(x, peer, async_op=True)
            group.recv(peer)
            work.wait()
        for x in (small, middle, registered):
            group.all_reduce(x, out=x, op="max")
        group.all_reduce(small, algorithm="ring")
        group.all_gather(small)
        group.all_reduce(small, async_op=True).wait()

    for _ in range(200):
        turn()
    before = resident_bytes()
    for _ in range(1000):
        turn()
    print(resident_bytes() - before, flush=True)
"""


SHORT_LIVED = """
import gc
import numpy
import ferrorpc

def shared_bytes():
    gc.collect()
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))

with ferrorpc.init_process_group(transport="shared_memory") as group:
    like = {"weight": numpy.ones(20_000, numpy.float32), "bias": numpy.ones(30)}

    def turn():
        assert ferrorpc.GradientSynchronizer(like, group)(like)["weight"].all()
        with group.subgroup([1, 0]) as pair:
            assert pair.all_reduce(numpy.ones(25_000)).all()

    for _ in range(5):
        turn()
    before = shared_bytes()
    for _ in range(30):
        turn()
    print(shared_bytes() - before, flush=True)
"""


BROKEN_OFF = """
import gc
import time
import numpy
import ferrorpc

def mapped():
    with open("/proc/self/maps") as maps:
        return sum("memfd:ferrorpc" in line for line in maps)

def turn(group):
    like = {"weight": numpy.ones(20_000, numpy.float32)}
    try:
        synchroniser = ferrorpc.GradientSynchronizer(like, group)
        if group.rank:
            return group.abort("enough")
        synchroniser(like)
    except ferrorpc.GroupAbortedError:  # rank 0's, in the step or on its way there
        pass

group = ferrorpc.init_process_group(transport="shared_memory")
for _ in range(3):
    turn(group)
    group = group.reform()
until = time.monotonic() + 10
while mapped() > 2 and time.monotonic() < until:  # threads of the generations before are about to end
    gc.collect()
    time.sleep(0.01)
print(mapped(), flush=True)
group.close()
"""


CLOSED_AND_KEPT = """
import gc
import os
import numpy
import ferrorpc

def shared():
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:ferrorpc" in line for line in maps)
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return mapped + sum("memfd:ferrorpc" in os.readlink(name) for name in names if os.path.islink(name))

def use(group):
    synchroniser = ferrorpc.GradientSynchronizer({"weight": numpy.ones(20_000, numpy.float32)}, group)
    synchroniser({"weight": numpy.ones(20_000, numpy.float32)})
    works = [group.all_reduce(numpy.ones(count), async_op=True) for count in (16, 25_000, 500_000)]
    for subgroup in (group, group.subgroup([1, 0]), group.subgroup([0, 1])):
        for count in (16, 25_000, 500_000):
            x = numpy.ones(count, numpy.float32)
            group.all_reduce(x)
            group.reduce(x, root=1)
            group.broadcast(x if group.rank == 0 else None, root=0)
            group.reduce_scatter(x)
            group.all_gather(x)
            group.all_reduce(x, algorithm="ring")
            group.all_reduce(group.empty(count), op="max")
        subgroup.barrier()
    closed = []
    for _ in range(3):  # each frees those before it
        with group.subgroup([0, 1]) as subgroup:
            subgroup.all_gather(numpy.ones(16))
            subgroup.barrier()
        group.barrier()
        closed.append(subgroup)
    return group, closed, [(work, work.wait()) for work in works]

gc.disable()
group = ferrorpc.init_process_group(transport="shared_memory")
kept = []
for _ in range(3):
    kept.append(use(group))
    group = group.reform()
group.close()
print(shared(), flush=True)
"""


def numbers_of_two(tmp_path: Path, script: str) -> list[int]:
    """What each of two ranks prints."""
    result = run("-n", "2", write_script(tmp_path, script), timeout=120)
    assert result.returncode == 0, result.stderr
    numbers = [int(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(numbers) == 2
    return numbers


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_an_idle_group_takes_hardly_any_processor_time(transport: str, tmp_path: Path) -> None:
    """Beats and keepalives are some thousandths of a processor; a thread that polls would be far more."""
    result = run("-n", "3", write_script(tmp_path, IDLE.format(transport=transport)))
    assert result.returncode == 0, result.stderr
    shares = [float(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(shares) == 3
    assert max(shares) < 0.03


@pytest.mark.shared_memory
def test_ten_thousand_operations_leave_no_memory_behind(tmp_path: Path) -> None:
    """Through shared memory and as messages in it. gRPC's own allocations come and go by some MiB."""
    assert max(numbers_of_two(tmp_path, BUSY)) < 2 << 20


def test_synchronisers_and_subgroups_that_are_over_give_their_shared_memory_back(tmp_path: Path) -> None:
    assert max(numbers_of_two(tmp_path, SHORT_LIVED)) < 128 << 10


@pytest.mark.shared_memory
def test_generations_that_were_broken_off_within_a_step_leave_no_mapping(tmp_path: Path) -> None:
    """Only this rank's own segment and its peer's are there."""
    assert numbers_of_two(tmp_path, BROKEN_OFF) == [2, 2]


@pytest.mark.shared_memory
def test_a_closed_group_keeps_no_shared_memory_where_nothing_collects_garbage(tmp_path: Path) -> None:
    """Trainers switch Python's collector off, and programs keep groups that are over, in a list or in an error's frames."""
    assert numbers_of_two(tmp_path, CLOSED_AND_KEPT) == [0, 0]
