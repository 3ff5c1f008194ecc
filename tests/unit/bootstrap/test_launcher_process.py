"""Ranks of one run have one launcher, whatever is wrapped around each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ferrorpc.bootstrap.launcher_process import launcher_process_id

SHOW = "from ferrorpc.bootstrap.launcher_process import launcher_process_id; print(launcher_process_id('TRIAL_RANK'))"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """1 starts the launcher 7, which starts ranks 20 and, within a wrapper, 31."""
    for process, parent, rank in ((1, 0, ""), (7, 1, ""), (20, 7, "0"), (30, 7, "1"), (31, 30, "1")):
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "stat").write_text(f"{process} (a (name) R 9) S {parent} {process} 0\n")
        (folder / "environ").write_bytes(b"TRIAL_RANKS=2\0" + (f"TRIAL_RANK={rank}\0".encode() if rank else b""))
    return tmp_path


def test_ranks_of_one_run_have_one_launcher(proc: Path) -> None:
    assert [launcher_process_id("TRIAL_RANK", rank, proc) for rank in (20, 31)] == ["7", "7"]


@pytest.mark.parametrize("gone", ["7/environ", "30/stat"])
def test_what_cannot_be_read_leaves_it_open(proc: Path, gone: str) -> None:
    (proc / gone).unlink()
    assert launcher_process_id("TRIAL_RANK", 31, proc) == ""


def test_a_launcher_beyond_the_process_namespace_leaves_it_open(proc: Path) -> None:
    (proc / "30" / "stat").write_text("30 (sh) S 0 30 0\n")
    assert launcher_process_id("TRIAL_RANK", 31, proc) == ""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
def test_real_processes_are_seen_through_their_shells() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRIAL_RANK"} | {"TRIAL_RANK": "0"}
    for command in ([sys.executable, "-c", SHOW], ["sh", "-c", '"$0" -c "$1"; true', sys.executable, SHOW]):
        found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=30)
        assert found.stdout == f"{os.getpid()}\n"
