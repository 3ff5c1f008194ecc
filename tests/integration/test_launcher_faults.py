"""Members that fail, die, stop or hold the GIL, under `ferrorpc run`: who is told what, how soon, and what the launcher says.

A death is known to the others within 1 s, and a stopped process within 4.5 s, on a machine that has time for them. Bounds here
are larger, so that a busy one keeps them, but lie well below what any other way of learning of it takes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.launching import coordinator_of, environment, read_numbers, run, start, started, write_script
from tests.waiting import eventually

PRELUDE = """
import ctypes, json, os, signal, sys, time
import numpy as np
import ferrorpc

directory, rank = sys.argv[1], int(os.environ["LOCAL_RANK"])

def note(name, value):
    with open(f"{directory}/{name}{rank}.part", "w") as file:
        file.write(f"{value}\\n")
    os.rename(f"{directory}/{name}{rank}.part", f"{directory}/{name}{rank}")

def lost(error):
    note("lost", json.dumps({"at": time.time(), "type": type(error).__name__, "rank": getattr(error, "rank", None),
                             "reason": getattr(error, "reason", ""), "text": str(error)}))
"""


def script_of(tmp_path, body):
    return write_script(tmp_path, PRELUDE + "\n" + body.replace("\n    ", "\n"))


def notes(tmp_path, name, ranks, timeout=60):
    """What these ranks noted, rank -> value, as soon as all have."""
    paths = {rank: tmp_path / f"{name}{rank}" for rank in ranks}
    for rank, path in paths.items():
        eventually(path.exists, f"the note {name!r} of rank {rank}", timeout)
    return {rank: json.loads(path.read_text()) for rank, path in paths.items()}


@pytest.fixture
def launch(tmp_path):
    """Starts a launcher that is gone when the test is."""
    launchers = []

    def begin(*arguments, **more):
        launchers.append(start(*arguments, str(tmp_path), **more))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.kill()
        launcher.communicate(timeout=60)


def test_an_exception_on_one_rank_reaches_the_others_with_its_words(tmp_path):
    body = """
    group = ferrorpc.init_process_group()
    group.barrier()
    if rank == 1:
        time.sleep(0.5)  # the others may still be in the barrier
        raise ValueError("bad batch")
    try:
        group.all_reduce(np.ones(4))
    except ferrorpc.PeerLostError as error:
        lost(error)
        raise
    """
    result = run("-n", "3", script_of(tmp_path, body), str(tmp_path))
    assert result.returncode == 1, result.stderr
    for found in notes(tmp_path, "lost", [0, 2], timeout=0).values():
        assert (found["rank"], found["reason"]) == (1, "ValueError: bad batch")
    report = [line.removeprefix("ferrorpc: ") for line in result.stderr.splitlines() if line.startswith("ferrorpc: ")]
    assert report[0] == "rank 1 ended with exit code 1; it was the first to fail."
    assert "  | ValueError: bad batch" in report
    assert report[-1] == "then: ranks 0, 2 ended with exit code 75"


def test_kill_9_of_a_rank_inside_an_all_reduce_is_named_by_the_others_at_once(tmp_path, launch):
    body = """
    group = ferrorpc.init_process_group()
    time.sleep(2.5)
    group.barrier()
    note("pid", os.getpid())
    try:
        while True:
            group.all_reduce(np.ones(1 << 20, np.float32))
    except ferrorpc.PeerLostError as error:
        lost(error)
    """
    without_report = "60"  # the coordinator waits so long for a member whose stream has ended
    launcher = launch("-n", "4", script_of(tmp_path, body), FERRORPC_GRACE=without_report, FERRORPC_LEASE=without_report)
    pids = read_numbers(tmp_path, "pid?", 4)
    time.sleep(0.3)
    killed_at = time.time()
    os.kill(pids[2], signal.SIGKILL)
    found = notes(tmp_path, "lost", [0, 1, 3])
    for rank, one in found.items():
        assert one["rank"] == 2, one
        assert one["at"] - killed_at < 20.0, f"rank {rank} took {one['at'] - killed_at:.2f} s"
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "rank 2 ended with SIGKILL; it was the first to fail." in err


TRAINING = """
    weights = ferrorpc.Parameter(np.zeros((64, 8), np.float32))

    class Linear:
        def parameters(self): return [weights]
        def named_parameters(self): return [("weights", weights)]
        def forward(self, x): return x @ weights.data
        def train(self): return self
        def eval(self): return self

    group = ferrorpc.init_process_group()
    ddp = ferrorpc.DistributedDataParallel(Linear(), group)
    truth = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    data = np.random.default_rng(rank + 1)
    written = []
    for step in range(60):
        x = data.normal(size=(16, 64)).astype(np.float32)
        weights.grad = x.T @ (ddp(x) - x @ truth) / np.float32(len(x))
        ddp.sync_gradients()
        weights.data -= np.float32(0.05) * weights.grad
        if step % 10 == 0:
            group.store.set(f"rank/{rank}/step/{step}", str(step).encode())
            written.append(step)
        if step == 20:
            note("step", step)
        time.sleep(0.02)
    missing = [step for step in written if group.store.get(f"rank/{rank}/step/{step}", timeout=0) != str(step).encode()]
    import hashlib
    note("end", json.dumps({"hash": hashlib.sha256(weights.data.tobytes()).hexdigest(), "missing": missing,
                            "generation": group.generation}))
    group.close()
"""


def test_kill_9_of_the_coordinator_in_mid_training_changes_nothing(tmp_path):
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    quiet.mkdir()
    script = script_of(tmp_path, TRAINING)
    result = run("-n", "3", script, str(quiet))
    assert result.returncode == 0, result.stderr
    disturbed.mkdir()
    with started("-n", "3", script, str(disturbed)) as launcher:
        read_numbers(disturbed, "step?", 3)
        pid, _ = coordinator_of(launcher.pid)
        os.kill(pid, signal.SIGKILL)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert "the coordinator ended (SIGKILL); it is started again" in err
    undisturbed = notes(quiet, "end", range(3), timeout=0)
    ends = notes(disturbed, "end", range(3), timeout=0)
    assert {one["hash"] for one in ends.values()} == {one["hash"] for one in undisturbed.values()}
    assert len({one["hash"] for one in ends.values()}) == 1
    assert [one["missing"] for one in ends.values()] == [[], [], []], "an acknowledged write was lost"
    assert {one["generation"] for one in ends.values()} == {1}, "nobody had to join again"


def test_a_stopped_rank_is_named_in_time_and_fenced_when_it_wakes(tmp_path, launch):
    body = """
    group = ferrorpc.init_process_group()
    group.barrier()
    note("pid", os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        group.all_reduce(np.ones(1 << 18, np.float32))
    except ferrorpc.FerroError as error:
        lost(error)
    if rank == 1:
        try:
            group.store.set("from/the/dead", b"x")
            note("write", json.dumps("applied"))
        except ferrorpc.FerroError as error:
            note("write", json.dumps(type(error).__name__))
    else:
        while not os.path.exists(f"{directory}/write1"):
            time.sleep(0.02)
        note("seen", json.dumps(group.store.keys("from")))
    """
    launcher = launch("-n", "3", script_of(tmp_path, body))
    pids = read_numbers(tmp_path, "pid?", 3)
    stopped_at = time.time()
    for rank, one in notes(tmp_path, "lost", [0, 2]).items():
        assert (one["type"], one["rank"]) == ("PeerLostError", 1)
        assert one["at"] - stopped_at < 15.0, f"rank {rank} took {one['at'] - stopped_at:.2f} s"
    os.kill(pids[1], signal.SIGCONT)
    assert notes(tmp_path, "lost", [1])[1]["type"] == "StaleGenerationError"
    assert notes(tmp_path, "write", [1])[1] == "StaleGenerationError"
    assert notes(tmp_path, "seen", [0, 2]) == {0: [], 2: []}
    launcher.communicate(timeout=60)


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_for_longer_than_its_lease_is_shown_as_stalled_and_survives(tmp_path, launch):
    body = """
    group = ferrorpc.init_process_group()
    pipe = os.open(f"{directory}/pipe", os.O_RDWR)
    group.barrier()
    note("pid", os.getpid())
    if rank == 1:
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    while not os.path.exists(f"{directory}/stalled"):
        time.sleep(0.02)  # so that none waits for a rank that is not stalled yet
    total = group.all_reduce(np.ones(1))
    note("total", json.dumps(float(total[0])))
    """
    os.mkfifo(tmp_path / "pipe")
    launcher = launch("-n", "3", script_of(tmp_path, body), FERRORPC_LEASE="1")
    read_numbers(tmp_path, "pid?", 3)
    _, address = coordinator_of(launcher.pid)
    states = set()

    def is_seen(rank, state):
        status = subprocess.run(
            [sys.executable, "-m", "ferrorpc", "status", "--json", "--addr", address],
            capture_output=True, text=True, timeout=60, env=environment(),
        )  # fmt: skip
        if status.returncode == 0:
            states.update((member["rank"], member["state"]) for member in json.loads(status.stdout)["members"])
        return (rank, state) in states

    eventually(lambda: is_seen(1, "MEMBER_STATE_STALLED"), "rank 1 is shown as stalled", seconds=60.0)
    (tmp_path / "stalled").touch()
    told, waits = [], []
    for line in launcher.stderr:
        told.append(line)
        if "waits for rank 1" in line:
            waits.append(line)
        if len(waits) == 2:
            break
    assert len(waits) == 2, f"the launcher ended: {''.join(told)}"
    assert all(re.search(r"; rank 1 \(.*\): stalled \(its session is open", line) for line in waits), waits
    is_seen(1, "MEMBER_STATE_STALLED")
    (tmp_path / "pipe").write_text("x")
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert not [state for state in states if state[1] in ("MEMBER_STATE_DEAD", "MEMBER_STATE_SUSPECT")]
    assert notes(tmp_path, "total", range(3), timeout=0) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_a_script_that_never_closes_its_group_ends_in_time(tmp_path):
    body = """
    group = ferrorpc.init_process_group()
    group.all_reduce(np.ones(3))
    note("ready", time.time())
    """
    result = run("-n", "4", script_of(tmp_path, body), str(tmp_path))
    ended_at = time.time()
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert ended_at - min(notes(tmp_path, "ready", range(4), timeout=0).values()) < 15.0


def test_a_replacement_joins_the_survivors_that_reform(tmp_path):
    body = """
    group = ferrorpc.init_process_group()
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life:
        group.barrier()
        if rank == 1:
            time.sleep(0.5)  # the others may still be in the barrier
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.all_reduce(np.ones(4))
        except ferrorpc.PeerLostError as error:
            lost(error)
            group = group.reform(timeout=30)
    note("total", json.dumps([float(group.all_reduce(np.ones(1))[0]), group.generation]))
    group.close()
    """
    result = run("-n", "3", "--max-restarts", "1", "--restart", "worker", script_of(tmp_path, body), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert {one["rank"] for one in notes(tmp_path, "lost", [0, 2], timeout=0).values()} == {1}
    assert list(notes(tmp_path, "total", range(3), timeout=0).values()) == [[3.0, 2]] * 3


def test_an_elastic_world_goes_on_with_its_survivors_and_ends_well(tmp_path):
    body = """
    group = ferrorpc.init_process_group()
    while group.size < 3:  # on a slow machine two begin without the third
        if group.pending_members:
            group = group.reform(60)
        time.sleep(0.02)
    group.barrier()
    if group.rank == 1:
        time.sleep(0.5)  # the others may still be in the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(np.ones(4))
    except ferrorpc.PeerLostError:
        group = group.reform(timeout=30)
    print("members", group.size, "sum", group.all_reduce(1.0))
    group.close()
    """
    result = run("-n", "3", "--world-size", "2:3", script_of(tmp_path, body), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert [line.partition(": ")[2] for line in result.stdout.splitlines()] == ["members 2 sum 2.0"] * 2
    assert "ended with SIGKILL; the others finished without it" in result.stderr


def test_the_ten_line_example_runs(tmp_path):
    result = run("-n", "4", os.path.join(os.path.dirname(__file__), "../../examples/hello.py"))
    assert result.returncode == 0, result.stderr
    assert sorted(re.sub(r" +", " ", line) for line in result.stdout.splitlines()) == [
        f"{rank}: rank {rank} of 4: [{rank + 1}. {rank + 1}. {rank + 1}.] became [10. 10. 10.]" for rank in range(4)
    ]


REFUSING = """
import errno, sys
from ferrorpc.cli.launcher import child_processes, coordinator_process, launch
from ferrorpc.cli.main import run

refused, starts, Popen = {"ferrorpc_coordinator": 2, "script.py": 3}, {}, child_processes.subprocess.Popen

class Refusing(Popen):
    def __init__(self, command, **options):
        (kind, *_) = [*(each for each in refused if each in " ".join(command)), ""]
        starts[kind] = starts.get(kind, 0) + 1
        if starts[kind] == refused.get(kind):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        super().__init__(command, **options)
        if kind == "ferrorpc_coordinator" and starts[kind] == 1:
            with open(f"{sys.argv[1]}/coordinator", "w") as file:
                file.write(f"{self.pid}\\n")

child_processes.subprocess.Popen = Refusing
coordinator_process.REFUSED_SECONDS = launch.REFUSED_SECONDS = 0.3
sys.exit(run(["run", "-n", "2", "--max-restarts", "1", "--restart", "worker", f"{sys.argv[1]}/script.py", sys.argv[1]]))
"""


def test_a_job_that_runs_outlives_a_moment_in_which_the_system_starts_no_process(tmp_path):
    """Neither the coordinator nor a worker is started again at once, and both can be waited for."""
    body = """
    group = ferrorpc.init_process_group(timeout=60)
    while not os.path.exists(f"{directory}/coordinator"):
        time.sleep(0.02)
    if group.generation == 1:
        if rank == 0:
            os.kill(int(open(f"{directory}/coordinator").read()), signal.SIGKILL)
        group.session.barrier("all-there")
        if rank == 1:
            sys.exit("ValueError: this happens once")
        try:
            group.all_reduce(np.ones(4))
        except ferrorpc.PeerLostError:
            group = group.reform()
    assert group.all_reduce(np.ones(4)).tolist() == [2.0] * 4
    group.close()
    """
    script_of(tmp_path, body)
    (tmp_path / "refusing.py").write_text(REFUSING)
    command = [sys.executable, str(tmp_path / "refusing.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    refusal = "is not started again yet: beside [0-9] processes no other can be started: Resource temporarily unavailable"
    assert re.search(f"ferrorpc: the coordinator {refusal}", done.stderr)
    assert re.search(f"ferrorpc: rank 1 {refusal}", done.stderr)
