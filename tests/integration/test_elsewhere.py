"""What works without anything that only Linux has, and how the rest is refused. Nothing here ran on another system."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.coordinator_process import coordinator
from tests.integration.launching import environment, write_script

ELSEWHERE = str(Path(__file__).with_name("elsewhere.py"))
SUM = "import ferrorpc\nwith ferrorpc.init_process_group() as group:\n    print(group.all_reduce(group.rank + 1.0))"


def start(*words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ELSEWHERE, *words],
        env={**environment(), "GRPC_ENABLE_FORK_SUPPORT": "0", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_world_in_one_process(tmp_path: Path) -> None:
    script = (
        "from ferrorpc.testing import run_world\nprint(run_world(2, lambda group: float(group.all_reduce(group.rank + 1.0))))"
    )
    assert start(write_script(tmp_path, script)).communicate(timeout=60) == ("[3.0, 3.0]\n", "")


def test_processes_that_nobody_launched(tmp_path: Path) -> None:
    with coordinator() as process:
        where = {"FERRORPC_COORDINATOR": process.address, "FERRORPC_WORLD_SIZE": "2"}
        ranks = [start(write_script(tmp_path, SUM), **where) for _ in range(2)]
        assert [rank.communicate(timeout=60) for rank in ranks] == [("3.0\n", "")] * 2


def test_a_coordinator_with_a_journal(tmp_path: Path) -> None:
    process = start("ferrorpc_coordinator", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path))
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert line.startswith("listening 127.0.0.1:"), words
    assert process.returncode == 0, words


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["ferrorpc", "run", "-n", "2"], {}),
        (["ferrorpc", "bench", "all_reduce"], {}),
        (["ferrorpc", "bench", "--fit", "table.json"], {}),
        ([], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}),
    ],
    ids=["run", "bench", "fit", "torchrun"],
)
def test_what_needs_linux_says_so(tmp_path: Path, words: list[str], place: dict[str, str]) -> None:
    script = [] if "bench" in words else [write_script(tmp_path, SUM)]
    process = start(*words, *script, **place)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 64
    assert "Linux" in said
    assert "this is darwin\ntry: " in said
