"""A rank that computes longer than the others is named by `ferrorpc status`, while the job trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launching import run, write_script

SCRIPT = """
    import json, subprocess, sys, threading, time
    import numpy as np
    import ferrorpc

    def status(*more):
        command = [sys.executable, "-m", "ferrorpc", "status", *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ferrorpc.init_process_group() as group:
        like = {"weights": np.zeros(1000, np.float32)}
        sync = ferrorpc.GradientSynchronizer(like, group)
        for step in range(40):
            threading.Event().wait(0.03 if group.rank == 1 else 0.001)  # its computing
            sync(like)
        while group.rank == 0:
            members = json.loads(status("--json"))["members"]
            if all(member.get("training", {}).get("steps") == 40 for member in members):
                print(status(), flush=True)
                break
        group.barrier()
"""


def test_status_names_the_rank_that_computes_longest(tmp_path: Path) -> None:
    result = run("-n", "3", write_script(tmp_path, SCRIPT), FERRORPC_HEARTBEAT_INTERVAL="0.2")
    assert result.returncode == 0, result.stderr
    lines = [line.removeprefix("0: ").strip() for line in result.stdout.splitlines()]
    table = lines[lines.index("training steps, means in milliseconds") + 1 :]
    assert table[0].split() == ["rank", "steps", "compute", "exposed", "hidden"]
    rank, steps, compute, exposed, _ = table[1].split()
    assert (rank, steps) == ("1", "40"), "who computes longest comes first"
    assert float(compute) >= 29 * 39 / 40
    assert float(exposed) < float(table[2].split()[3]), "the others wait for it"
    assert table[4].startswith("rank 1 computes longest, ")


WAITS = """
    import itertools, json, subprocess, sys
    import numpy as np
    import ferrorpc

    def waited_ms(rank):
        command = [sys.executable, "-m", "ferrorpc", "status", "--json"]
        members = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["members"]
        return next(member["operation_ms"] for member in members if member["rank"] == rank)

    with ferrorpc.init_process_group() as group:
        x = np.ones(10, np.float32)
        sync = ferrorpc.GradientSynchronizer(x, group)
        operations = {
            "blocking": lambda: group.all_reduce(x),
            "asynchronous": lambda: group.all_reduce(x, async_op=True).wait(),
            "step": lambda: sync(x),
            "synchronize": lambda: [group.all_reduce(x, async_op=True), group.synchronize()],
            "store": lambda: meet(next(numbers)),
        }
        numbers = map(str, itertools.count())

        def meet(key):
            group.store.wait(key) if group.rank == 0 else group.store.set(key, b"")

        operation = operations[sys.argv[1]]
        operation()
        if group.rank == 1:
            while waited_ms(0) < 300:  # the other one waits for this one
                pass
        operation()
"""


@pytest.mark.parametrize("how", ["blocking", "asynchronous", "step", "synchronize", "store"])
def test_status_shows_who_waits_in_an_operation_that_is_not_over(tmp_path: Path, how: str) -> None:
    result = run("-n", "2", write_script(tmp_path, WAITS), how, FERRORPC_HEARTBEAT_INTERVAL="0.1")
    assert result.returncode == 0, result.stderr
