"""What processes have used of a GPU's memory is free again. Run them alone: whatever else uses the GPU changes what is free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.rank_processes import Ranks, ranks_of
from tests.gpu.scenarios import FAKE
from tests.gpu.without import skip_without_gpu

if "PYTEST_XDIST_WORKER" in os.environ:
    pytest.skip("other tests use the GPU's memory meanwhile: run these with -n 0", allow_module_level=True)
if not FAKE:
    skip_without_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
LOOK = "from cupy.cuda import runtime; print(runtime.memGetInfo()[0])"
MIB = 1 << 20
SUBGROUPS = 30
SLACK_BYTES = 60 * MIB
"""Less than a subgroup takes of one rank's GPU."""
NCCL_SLACK_BYTES = 16 * MIB
FREE_SECONDS = 20.0
"""How long it takes at most until memory that ranks no longer use is free."""


def free_bytes() -> int:
    """How much of the GPU's memory is free, in the eyes of a process of its own."""
    return 0 if FAKE else int(subprocess.run([sys.executable, "-c", LOOK], capture_output=True, check=True).stdout)


def is_free_again(ranks: Ranks, before: int, what: str) -> None:
    """As much as before is free."""
    seen = [before]

    def has_come() -> bool:
        seen.append(free_bytes())
        return seen[-1] >= before - SLACK_BYTES

    try:
        ranks.wait(has_come, f"memory is free after {what}", FREE_SECONDS)
    except AssertionError as error:
        error.add_note(f"{(before - seen[-1]) / MIB:.0f} MiB are not free again")
        raise


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_subgroups_and_processes_leave_none_behind(tmp_path: Path, end: str) -> None:
    without = free_bytes()
    with ranks_of(tmp_path, 2, "cuda_ipc", program="failing_program") as ranks:
        ranks.start_all("subgroups", count=SUBGROUPS, folder=str(tmp_path))
        ranks.hear_all("opened")
        before = free_bytes()
        (tmp_path / "begin").touch()
        ranks.hear_all("subgroups-closed")
        is_free_again(ranks, before, f"{SUBGROUPS} subgroups")
        if end == "killed":
            for process in ranks.now.values():
                process.process.kill()
                process.process.wait()
        else:
            (tmp_path / "end").touch()
            ranks.end_all()
        is_free_again(ranks, without, f"processes that were {end}")


@pytest.mark.parametrize("backend", ["nccl", "hybrid"])
def test_communicators_of_nccl_leave_none_behind(tmp_path: Path, backend: str) -> None:
    turns = 5
    with ranks_of(tmp_path, 1, backend, program="nccl_program") as ranks:
        ranks.start_all("alone", turns=turns)
        ranks.end_all()
        free = [int(ranks.hear(0, f"free-{turn}")[0]) for turn in range(turns)]
    assert free[-1] >= free[0] - NCCL_SLACK_BYTES, f"{[each // MIB for each in free]} MiB are free after each"
