"""The pairs of processes that train in turns: when one of them ends, so does the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks import ddp
from tests.integration.launching import wait_until_gone

ANSWERS = """echo '{"gradient_bytes": 4}'\n"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes ranks scripts. Returns a function that gives the process ids of all that were started."""

    def write(*lines: str):
        script = tmp_path / "rank"
        script.write_text("\n".join(["#!/bin/sh", f"echo $$ >> {tmp_path}/ids", *lines]))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return lambda: [int(line) for line in (tmp_path / "ids").read_text().split()]

    return write


def test_a_rank_that_ends_while_it_starts_is_named_and_the_other_is_not_waited_for(rank) -> None:
    started = rank("if [ $RANK = 1 ]; then sleep 0.2; exit 1; fi", "exec sleep 60")
    with pytest.raises(SystemExit, match="rank 1 of alone ended early"):
        ddp.Pair("alone", "mlp")
    assert wait_until_gone(started()) == []


def test_a_rank_that_ended_between_two_turns_is_named_and_the_other_ends(rank) -> None:
    started = rank(ANSWERS, "if [ $RANK = 1 ]; then exit 1; fi", "exec sleep 60")
    pair = ddp.Pair("alone", "mlp")
    pair._processes[1].wait(20.0)
    with pytest.raises(SystemExit, match="rank 1 of alone ended early"), pair:
        pair.turn(1)
    assert wait_until_gone(started()) == []
