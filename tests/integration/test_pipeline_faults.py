"""A process of a real pipeline that dies in mid-training: who is told what."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.launching import read_numbers, started, write_script

SCRIPT = """
    import json, os, sys
    import numpy as np
    import ferrorpc

    directory, rank = sys.argv[1], int(os.environ["RANK"])

    def note(name, value):
        with open(f"{directory}/{name}{rank}.part", "w") as file:
            file.write(f"{value}\\n")
        os.rename(f"{directory}/{name}{rank}.part", f"{directory}/{name}{rank}")

    class Linear:
        def __init__(self):
            self.weight = ferrorpc.Parameter(np.eye(256, dtype=np.float32))

        def parameters(self):
            return iter([self.weight])

        def forward(self, x):
            return x @ self.weight.data, x

        def backward_input(self, x, grad_y):
            return grad_y @ self.weight.data.T

        def backward_weight(self, x, grad_y):
            self.weight.grad = x.T @ grad_y

    group = ferrorpc.init_process_group()
    schedule = ferrorpc.schedules.named(sys.argv[2], group.size, 6)
    pipe = ferrorpc.Pipeline([Linear() for _ in schedule.pieces(rank)], group, schedule)
    x = np.ones((60, 256), np.float32)
    steps = 0
    try:
        while True:
            pipe.step(x, x, lambda y, target: (0.0, y - target))
            steps += 1
            if steps == 3:
                note("pid", os.getpid())
    except ferrorpc.PeerLostError as error:
        note("lost", json.dumps({"rank": error.rank, "text": str(error), "steps": steps}))
        raise
"""


@pytest.mark.parametrize(("schedule", "victim"), [("1f1b", 1), ("zbv", 0)])
def test_kill_9_of_a_stage_is_named_by_all_others(tmp_path: Path, schedule: str, victim: int) -> None:
    with started("-n", "3", write_script(tmp_path, SCRIPT), str(tmp_path), schedule) as launcher:
        pids = read_numbers(tmp_path, "pid?", 3)
        os.kill(pids[victim], signal.SIGKILL)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL, err
    assert f"rank {victim} ended with SIGKILL; it was the first to fail." in err
    for rank in {0, 1, 2} - {victim}:
        found = json.loads((tmp_path / f"lost{rank}").read_text())
        assert found["rank"] == victim
        assert f"rank {victim}" in found["text"]
        assert found["steps"] >= 3, "it was training"
    assert not (tmp_path / f"lost{victim}").exists()
