"""Two launchers with one coordinator, as on two nodes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.launching import environment, read_numbers, run, start, started, write_script

SUM = """
    import json, os, sys, time
    import numpy as np
    import ferrorpc

    group = ferrorpc.init_process_group()
    total = group.all_reduce(np.full(2, group.rank + 1.0))
    print(json.dumps([group.rank, group.size, total.tolist()]))
    if len(sys.argv) > 1 and group.rank == group.size - 1:
        os.kill(os.getpid(), 9)
    if len(sys.argv) > 1:
        group.all_reduce(np.ones(2))
    group.close()
"""


WHO_COMES_LATE = SUM.replace(
    "total =",
    """while group.size < 4:  # one that comes after the last call is let in then
        if group.pending_members:
            group = group.reform(60)
        time.sleep(0.02)
    total =""",
)


@pytest.fixture
def coordinator():
    """What an exit report ends would last a minute without one."""
    service = subprocess.Popen(
        [sys.executable, "-m", "ferrorpc", "coordinator", "--listen", "127.0.0.1:0", "--grace", "60", "--lease", "10"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    yield service.stdout.readline().split()[1]
    service.terminate()
    service.communicate(timeout=60)


def two_nodes(coordinator, script, *arguments, nodes="2", workers="2", **variables):
    """Runs so many workers on each of two nodes; gives both launchers' codes, outputs and errors."""
    logs = str(Path(script).parent / "logs")
    flags = ("-n", workers, "--nnodes", nodes, "--coordinator", coordinator, "--job", "j", "--log-dir", logs)
    launchers = [start(*flags, "--node-rank", str(rank), script, *arguments, **variables) for rank in range(2)]
    try:
        return [(*launcher.communicate(timeout=100), launcher.returncode) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()


def test_a_fixed_world_of_two_nodes_has_the_ranks_that_the_launchers_gave(tmp_path, coordinator):
    ends = two_nodes(coordinator, write_script(tmp_path, SUM))
    assert [code for _, _, code in ends] == [0, 0], ends
    for node, (out, _, _) in enumerate(ends):
        lines = dict(line.split(": ", 1) for line in out.splitlines())
        assert {label: json.loads(text) for label, text in lines.items()} == {
            f"node{node}:{rank}": [rank, 4, [10.0, 10.0]] for rank in (2 * node, 2 * node + 1)
        }

    assert {path.name for path in (tmp_path / "logs/j/attempt0").iterdir()} == {f"rank{rank}.log" for rank in range(4)}


def test_an_elastic_world_gives_ranks_to_whoever_comes(tmp_path, coordinator):
    ends = two_nodes(coordinator, write_script(tmp_path, WHO_COMES_LATE), nodes="1:2")
    assert [code for _, _, code in ends] == [0, 0], ends
    names = {f"node{node}-{worker}.log" for node in range(2) for worker in range(2)}
    assert {path.name for path in (tmp_path / "logs/j/attempt0").iterdir()} == names
    rows = [json.loads(line.partition(": ")[2]) for out, _, _ in ends for line in out.splitlines()]
    assert sorted(rows) == [[rank, 4, [10.0, 10.0]] for rank in range(4)]


def test_a_node_whose_members_lost_one_elsewhere_ends_with_75(tmp_path, coordinator):
    (_, err, first), (_, other_err, second) = two_nodes(coordinator, write_script(tmp_path, SUM), "fail")
    assert (first, second) == (75, 128 + 9), err + other_err
    assert "it was the first of those that lost a member or the coordinator" in err
    assert re.search(r"ferrorpc:   \| ferrorpc.errors.PeerLostError: rank 3 \(node1-1 on .*\) was lost: .*SIGKILL", err), err
    assert "rank node1:3 ended with SIGKILL; it was the first to fail." in other_err


def test_the_end_of_the_only_worker_of_a_node_is_reported_to_the_others(tmp_path, coordinator):
    (_, err, first), (_, other_err, second) = two_nodes(coordinator, write_script(tmp_path, SUM), "fail", workers="1")
    assert (first, second) == (75, 128 + 9), err + other_err
    assert re.search(r"PeerLostError: rank 1 \(node1-0 on .*\) was lost: .*SIGKILL", err), err


def test_a_report_whose_process_is_slow_to_start_is_waited_for(tmp_path, coordinator):
    """As on a busy machine, where its imports may take seconds."""
    slow = 'import sys, time\n"ferrorpc.cli.launcher.exit_reporter" in sys.orig_argv and time.sleep(1.5)\n'
    (tmp_path / "sitecustomize.py").write_text(slow)
    ends = two_nodes(coordinator, write_script(tmp_path, SUM), "fail", workers="1", PYTHONPATH=str(tmp_path))
    assert re.search(r"PeerLostError: rank 1 \(node1-0 on .*\) was lost: .*SIGKILL", ends[0][1]), ends


def test_a_reporter_that_has_ended_is_told_of_with_its_words_and_started_again_at_the_next_report(tmp_path, coordinator):
    starts = f"""
        import os, sys
        if "ferrorpc.cli.launcher.exit_reporter" in sys.orig_argv and not os.path.exists({str(tmp_path / "ended")!r}):
            open({str(tmp_path / "ended")!r}, "w").close()
            print("no memory", file=sys.stderr, flush=True)
            os._exit(1)
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(starts))
    body = """
        import os, sys, time
        import ferrorpc
        group = ferrorpc.init_process_group()
        group.barrier()
        while not os.path.exists(sys.argv[1]):  # since then nobody reports
            time.sleep(0.02)
        if group.rank == 1:
            os.kill(os.getpid(), 9)
        group.all_reduce(1.0)
    """
    script = write_script(tmp_path, body)
    arguments = ("-n", "2", "--grace", "60", "--coordinator", coordinator, script, str(tmp_path / "ended"))
    result = run(*arguments, timeout=50, PYTHONPATH=str(tmp_path))
    assert result.returncode == 128 + 9, result.stderr
    assert "exit reporter: no memory\n" in result.stderr
    assert result.stderr.count("exits of workers are not reported: the process that does so has ended;") == 1


def test_a_signal_ends_the_wait_for_a_report(tmp_path, coordinator):
    slow = """
        import sys, time
        if "ferrorpc.cli.launcher.exit_reporter" in sys.orig_argv:
            time.sleep(100)
        if "run" in sys.orig_argv:
            from ferrorpc.cli.launcher import launch
            launch._READY_SECONDS = 100.0
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(slow))
    script = write_script(tmp_path, "import sys; sys.exit(3)")
    with started("-n", "1", "--coordinator", coordinator, script, PYTHONPATH=str(tmp_path)) as launcher:
        assert any("ended with exit code 3" in line for line in launcher.stderr)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 3


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="giving a process another host name needs root"
)
def test_nodes_without_a_number_are_told_apart_by_their_host_names(tmp_path, coordinator):
    script = write_script(tmp_path, SUM)
    flags = ["run", "-n", "2", "--nnodes", "2", "--coordinator", coordinator, script]
    rename = 'hostname "$0"; exec "$@"'
    launchers = [
        subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", rename, host, sys.executable, "-m", "ferrorpc", *flags],
            stdout=subprocess.PIPE, text=True, env=environment(),
        )
        for host in ("left", "right")
    ]  # fmt: skip
    outs = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    lines = dict(line.split(": ", 1) for out in outs for line in out.splitlines())
    assert set(lines) == {"left-0", "left-1", "right-0", "right-1"}
    assert sorted(json.loads(text)[0] for text in lines.values()) == [0, 1, 2, 3]


AFTER_ANOTHER = """
    import os, sys, time
    import ferrorpc

    directory, role = sys.argv[1:]
    group = ferrorpc.init_process_group()
    if role == "first":
        group.close()  # and this process goes on without it
    with open(os.path.join(directory, f"{role}.{group.rank}"), "w") as file:
        print(os.getpid(), file=file)
    while not os.path.exists(os.path.join(directory, f"end-{role}")):
        time.sleep(0.01)
    if role == "second":
        group.barrier()
        group.close()
"""


def test_an_exit_is_not_that_of_a_later_process_of_the_same_name(tmp_path, coordinator):
    """A second launcher of one node and job waits until the first one's members have left, and takes their names over."""
    script = write_script(tmp_path, AFTER_ANOTHER)
    flags = ("-n", "2", "--coordinator", coordinator, script, str(tmp_path))
    launchers = []
    try:
        for role in ("first", "second"):
            launchers.append(start(*flags, role))
            read_numbers(tmp_path, f"{role}.*", 2)
        for role, launcher in zip(("first", "second"), launchers, strict=True):
            (tmp_path / f"end-{role}").touch()
            out, err = launcher.communicate(timeout=60)
            assert launcher.returncode == 0, out + err
    finally:
        for launcher in launchers:
            launcher.kill()
