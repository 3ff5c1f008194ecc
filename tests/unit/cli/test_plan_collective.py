"""`ferrorpc plan all_reduce` and the others: what they print, what they draw, what they refuse."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from ferrorpc.cli.plan import command
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.tuning import packaged_table
from ferrorpc.errors import ConfigError
from ferrorpc.testing import run_world
from ferrorpc.wire.cost_table import Costs, CostTable

TABLE = CostTable("slow bytes", {2: Costs(1e-9, 0.0, 1e-6, 0.0)})


@pytest.fixture(autouse=True)
def no_outer_table(monkeypatch):
    for name in ("FERRORPC_ALGORITHM", "FERRORPC_COST_TABLE", "FERRORPC_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def _size(operation: str, size: str) -> tuple[str, ...]:
    """Its option; a barrier moves nothing, so it has none."""
    return () if operation == "barrier" else ("--size", size)


@pytest.mark.parametrize("operation", [operation.value for operation in Operation])
def test_every_operation_is_planned(operation):
    text = run(operation, "--ranks", "4", *_size(operation, "1KiB"))
    assert text.startswith(f"{operation}, {'' if operation == 'barrier' else '1KiB on '}4 ranks of 1 host\n")
    assert "cost table 'packaged'" in text
    assert "\n*  " in text


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "barrier"])
def test_it_begins_as_group_explain_does(operation):
    """A group of the simulated world sends messages, so it has nothing to say of shared memory."""

    def explained(group):
        return group.explain(operation, 4096).splitlines()

    lines = run(operation, "--ranks", "3", *_size(operation, "4KiB")).splitlines()
    assert " on 3 ranks: in shared memory, which all of them have; " in lines[1]
    assert lines[2] == "as messages it would be:"
    assert lines[3:5] == run_world(3, explained)[0][:2]


@pytest.mark.parametrize("arguments", [("--hosts", "2"), ("--ranks", "1"), ("--algorithm", "ring")])
def test_shared_memory_is_spoken_of_only_where_it_is_used(arguments, monkeypatch):
    assert "in shared memory" not in run("all_reduce", *arguments)
    assert "in shared memory" in run("all_reduce")
    monkeypatch.setenv("FERRORPC_TRANSPORT", "grpc")
    assert "in shared memory" not in run("all_reduce")


def test_steps_of_a_rank_are_listed():
    text = run("all_reduce", "--algorithm", "one_shot", "--ranks", "3", "--size", "40", "--rank", "1")
    assert "rank 1 does" in text
    for line in ("send in0[0:10] to rank 2", "send in0[0:10] to rank 0", "fold what rank 2 sent into work0[0:10]"):
        assert line in text
    assert "... and" in run("all_reduce", "--algorithm", "ring", "--ranks", "20")


def test_figures_are_those_of_the_model():
    figures = json.loads(run("broadcast", "--algorithm", "direct", "--ranks", "3", "--size", "1000", "--json"))
    direct = next(each for each in figures["algorithms"] if each["algorithm"] == "direct")
    assert figures["algorithm"] == "direct"
    assert direct["messages"] == 2
    assert direct["sent_bytes"] == 2000
    costs = packaged_table().costs(3)
    expected = costs.alpha_seconds + 2 * costs.message_seconds + 2000 * costs.beta_seconds_per_byte
    assert direct["seconds"] == pytest.approx(expected)
    assert direct["followed"]


def test_a_cost_table_decides(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text(TABLE.text())
    assert json.loads(run("all_reduce", "--ranks", "4", "--size", "1KiB", "--json"))["algorithm"] == "one_shot"
    arguments = ("all_reduce", "--ranks", "4", "--size", "1KiB", "--json")
    assert json.loads(run(*arguments, "--cost-table", str(path)))["algorithm"] == "two_shot"
    monkeypatch.setenv("FERRORPC_COST_TABLE", str(path))
    assert json.loads(run(*arguments))["cost_table"] == "slow bytes"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        run(*arguments)


def test_the_setting_asks_for_an_algorithm_here_too(monkeypatch):
    monkeypatch.setenv("FERRORPC_ALGORITHM", "all_reduce=ring")
    told = "on 3 ranks: ring, each slice round the ring (asked for by the setting algorithm)\n"
    assert told in run("all_reduce", "--ranks", "3")


def test_hosts_bring_hierarchical():
    names = {each["algorithm"] for each in json.loads(run("all_reduce", "--hosts", "2", "--json"))["algorithms"]}
    assert "hierarchical" in names
    assert "hierarchical" not in run("all_reduce")


def test_a_picture_has_a_row_for_every_lane_that_does_something(tmp_path):
    path = tmp_path / "plan.svg"
    run("all_reduce", "--algorithm", "ring", "--ranks", "3", "--size", "3MiB", "--svg", str(path))
    words = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    for rank in range(3):
        for lane in ("sends", "receives", "folds"):
            assert f"rank {rank} {lane}" in words
    assert words.count("to 1") == 4, "one box for each message of rank 0"
    assert any("milliseconds" in word for word in words if word)


def test_what_cannot_be_planned_is_refused(tmp_path):
    runner = CliRunner()
    assert "there are ranks 0 to 3" in runner.invoke(command, ["barrier", "--ranks", "4", "--rank", "4"]).output
    assert "3 ranks cannot be spread over 4 hosts" in runner.invoke(command, ["barrier", "--ranks", "3", "--hosts", "4"]).output
    assert "--ranks" in runner.invoke(command, ["barrier", "--ranks", "1000000000"]).output
    assert "expected a size" in runner.invoke(command, ["gather", "--size", "many"]).output
    with pytest.raises(ConfigError, match="no algorithm 'butterfly'"):
        run("all_reduce", "--algorithm", "butterfly")
    with pytest.raises(ConfigError, match="several hosts"):
        run("all_reduce", "--algorithm", "hierarchical")
    with pytest.raises(ConfigError, match="too many messages"):
        run("all_reduce", "--algorithm", "ring", "--ranks", "3000", "--svg", str(tmp_path / "x.svg"))
