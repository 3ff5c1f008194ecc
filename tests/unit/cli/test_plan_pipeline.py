"""`ferrorpc plan pipeline`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrorpc import schedules
from ferrorpc.cli.main import run
from ferrorpc.exit_codes import EXIT_CONFIG


def test_a_schedule_is_shown_with_its_order_bubble_and_peak(capsys):
    assert run(["plan", "pipeline", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one_f_one_b: 2 stages, 2 microbatches",
        "",
        "rank 0  0F0 0F1 .   0B0 .   0B1",
        "rank 1  .   1F0 1B0 1F1 1B1",
        "",
        "rank  pieces  busy   idle  peak activations",
        "   0  0          6  33.3%                 2",
        "   1  1          6  33.3%                 1",
        "",
        "makespan 9, bubble 33.3%, peak 2 activations",
    ]


def test_pictures_traces_and_tables_are_written(tmp_path: Path, capsys):
    names = {option: tmp_path / f"plan.{option}" for option in ("svg", "trace", "csv")}
    options = [text for option, path in names.items() for text in (f"--{option}", str(path))]
    assert run(["plan", "pipeline", "--schedule", "zbv", "--stages", "4", "--microbatches", "8", *options]) == 0
    assert "bubble 5.9%, peak 4 activations" in capsys.readouterr().out
    assert names["svg"].read_text().startswith("<svg")
    assert json.loads(names["trace"].read_text())["traceEvents"]
    assert schedules.Schedule.from_csv(names["csv"]).actions == schedules.zbv(4, 8).actions


def test_a_schedule_is_read_from_a_table(tmp_path: Path, capsys):
    schedules.gpipe(2, 3).to_csv(tmp_path / "mine.csv")
    assert run(["plan", "pipeline", "--from-csv", str(tmp_path / "mine.csv"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["schedule"], figures["stages"], figures["microbatches"]) == ("mine", 2, 3)
    assert figures["bubble_fraction"] == pytest.approx(1 / 4)


def test_a_schedule_with_a_name_and_a_table_is_refused(tmp_path: Path, capsys):
    assert run(["plan", "pipeline", "--schedule", "gpipe", "--from-csv", str(tmp_path / "mine.csv")]) == 64
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--stages", "--microbatches", "--chunks"])
def test_counts_beside_a_table_are_refused(tmp_path: Path, capsys, option):
    schedules.gpipe(2, 3).to_csv(tmp_path / "mine.csv")
    assert run(["plan", "pipeline", "--from-csv", str(tmp_path / "mine.csv"), option, "2"]) == 64
    assert f"leave out {option}" in capsys.readouterr().err


def test_costs_count(capsys):
    arguments = ["--forward", "2", "--backward-input", "3", "--backward-weight", "4", "--latency", "0.5", "--json"]
    assert run(["plan", "pipeline", "--schedule", "gpipe", "--stages", "2", "--microbatches", "1", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 2 * (2 + 3 + 4) + 2 * 0.5


def test_without_a_name_all_are_compared_at_these_costs(capsys):
    assert run(["plan", "pipeline", "--stages", "4", "--microbatches", "7", "--latency", "0.2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["schedule", "chunks", "makespan", "bubble", "peak", "activations"]
    spans = [float(line.split()[2]) for line in lines[1:7]]
    assert spans == sorted(spans)
    assert lines[-1].startswith("not here: dualpipe_v with 4 stages and 7 microbatches")


def test_what_a_schedule_does_not_admit_is_said(capsys):
    assert run(["plan", "pipeline", "--schedule", "zbv", "--chunks", "3"]) == EXIT_CONFIG
    assert "every rank holds 2" in capsys.readouterr().err


def test_files_are_of_one_schedule(capsys):
    assert run(["plan", "pipeline", "--svg", "all.svg"]) == EXIT_CONFIG
    assert "--schedule" in capsys.readouterr().err


def test_a_pipeline_of_more_stages_than_any_grid_can_show_is_refused(capsys):
    assert run(["plan", "pipeline", "--schedule", "gpipe", "--stages", "100000", "--microbatches", "1"]) == EXIT_CONFIG
    assert "--stages" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--stages", "--microbatches", "--chunks"])
def test_a_pipeline_of_nothing_is_refused(option: str, capsys):
    assert run(["plan", "pipeline", option, "0"]) == EXIT_CONFIG
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("counts", ["--chunks 99999", "--stages 1000 --microbatches 101", "--microbatches 9999999"])
def test_counts_that_would_take_for_ever_are_refused(counts: str, capsys):
    assert run(["plan", "pipeline", *counts.split()]) == EXIT_CONFIG
    assert "at most 100000 can be shown: ask for fewer" in " ".join(capsys.readouterr().err.split())


def test_a_comparison_that_takes_long_tells_how_far_it_is(capsys, monkeypatch):
    counts = ["plan", "pipeline", "--stages", "4", "--microbatches", "2"]
    assert run(counts) == 0
    quiet = capsys.readouterr()
    monkeypatch.setattr("ferrorpc.cli.plan.LARGE", 8)
    assert run(counts) == 0
    told = capsys.readouterr()
    assert (quiet.err, told.out) == ("", quiet.out)
    assert [line.partition(":")[0] for line in told.err.splitlines()] == list(schedules.NAMED)


def test_one_schedule_that_takes_long_is_named_as_it_begins(capsys, monkeypatch, tmp_path):
    file = str(tmp_path / "g.csv")
    counts = ["plan", "pipeline", "--schedule", "gpipe", "--stages", "4", "--microbatches", "2", "--csv", file]
    assert run(counts) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("ferrorpc.cli.plan.LARGE", 8)
    assert run(counts) == 0
    assert capsys.readouterr().err == "gpipe: 4 stages, 2 microbatches ...\n"
    assert run(["plan", "pipeline", "--from-csv", file]) == 0
    assert capsys.readouterr().err == "g: 4 stages, 2 microbatches ...\n"
