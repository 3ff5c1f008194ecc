"""The faults of the Compose profile `chaos`, without an engine."""

from __future__ import annotations

import contextlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

CHAOS = ROOT / "deploy" / "chaos" / "chaos.py"
MENDED = {"kill": "/containers/w1/start", "pause": "/containers/w1/unpause", "disconnect": "/networks/job/connect"}


@pytest.mark.parametrize("fault", MENDED)
@pytest.mark.parametrize("end", [None, SystemExit])
def test_a_fault_is_mended_also_where_somebody_ends_it_early(fault: str, end: type[BaseException] | None) -> None:
    chaos = runpy.run_path(str(CHAOS))
    asked: list[str] = []
    chaos[fault].__globals__["ask"] = lambda method, path, body=None: asked.append(path)

    def wait() -> None:
        if end is not None:
            raise end

    worker = {"Id": "w1", "Names": ["/worker-1"], "NetworkSettings": {"Networks": {"job": {}}}}
    with contextlib.nullcontext() if end is None else pytest.raises(end):
        chaos[fault](worker, wait)
    assert asked[1:] == [MENDED[fault]]


STOPPED_WHILE_THE_ENGINE_WORKS = """
import os, runpy, signal, sys
chaos, number = runpy.run_path(sys.argv[1]), getattr(signal, sys.argv[2])
names = chaos["main"].__globals__
names["project"] = lambda: "job"
names["workers"] = lambda name: [{"Id": "w1", "Names": ["/worker-1"]}]
def ask(method, path, body=None):
    print(path, flush=True)
    if path.endswith("/pause"):
        os.kill(os.getpid(), number)
names["ask"] = ask
sys.argv[1:] = ["pause"]
chaos["main"]()
"""


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_while_the_engine_still_works_on_a_fault_ends_it_mended(number: str, code: int) -> None:
    command = [sys.executable, "-c", STOPPED_WHILE_THE_ENGINE_WORKS, str(CHAOS), number]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines()[1:] == ["/containers/w1/pause", "/containers/w1/unpause"]


def test_an_engine_that_does_not_answer_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    chaos = runpy.run_path(str(CHAOS))
    chaos["project"].__globals__["SOCKET"] = str(tmp_path / "engine.sock")
    with pytest.raises(SystemExit, match=r"no engine answers at .*engine\.sock: .*\ntry: .*DOCKER_SOCKET"):
        chaos["project"]()
