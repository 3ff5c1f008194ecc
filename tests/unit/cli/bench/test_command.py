"""`ferrorpc bench`: what `--json` alone measures, and where the flag may stand."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from ferrorpc.cli.bench import all_reduce, barrier
from ferrorpc.cli.bench.command import command

CONTENDERS = ("shared_memory", "shared_memory registered", "grpc")
RESULTS = {"machine": {}, "loads": [], "rows": [{"results": {label: {"median_seconds": 1.0} for label in CONTENDERS}}]}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is: figures are here already."""
    monkeypatch.setattr(all_reduce, "run", lambda *_, **__: RESULTS)
    monkeypatch.setattr(barrier, "run", lambda *_, **__: {"benchmark": "barrier"})


@pytest.mark.parametrize("words", [["--json"], ["all_reduce", "--json"], ["--json", "all_reduce"]], ids=" ".join)
def test_json_alone_is_that_of_all_reduce(words):
    result = CliRunner().invoke(command, words)
    assert (result.exit_code, json.loads(result.stdout)) == (0, RESULTS)


def test_json_before_a_command_is_for_that_command():
    result = CliRunner().invoke(command, ["--json", "barrier"])
    assert json.loads(result.stdout) == {"benchmark": "barrier"}


def test_nothing_measured_is_a_failure(monkeypatch):
    nothing = {"rows": [{"results": {label: {"error": "it did not start"} for label in CONTENDERS}}]}
    monkeypatch.setattr(all_reduce, "run", lambda *_, **__: nothing)
    assert CliRunner().invoke(command, ["all_reduce", "--json"], standalone_mode=False).return_value == 1


def test_nothing_is_measured_unasked():
    result = CliRunner().invoke(command, [])
    assert (result.exit_code, result.stdout.splitlines()[0].startswith("Usage: ")) == (0, True)


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    written = tmp_path / "costs.json"
    written.touch()
    monkeypatch.setattr("ferrorpc.cli.bench.fit.measure", lambda worlds: pytest.fail("it measures"))
    monkeypatch.setattr("os.access", lambda path, mode: (str(path), mode) != (str(written), os.W_OK))
    for path, reason in ((written, "is not writable"), (tmp_path, "is a directory"), (written / "below", "not writable")):
        result = CliRunner().invoke(command, ["--fit", str(path)])
        assert result.exit_code == 2
        assert reason in result.output


@pytest.mark.parametrize("words", [["--json"], ["barrier"]], ids=" ".join)
def test_a_fit_is_not_mixed_with_other_measurements(words, tmp_path):
    result = CliRunner().invoke(command, ["--fit", str(tmp_path / "costs.json"), *words])
    assert result.exit_code == 2
    assert "--fit is a separate measurement" in result.output
