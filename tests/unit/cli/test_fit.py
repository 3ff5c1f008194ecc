"""Fitting a cost table: the parameters behind simulated times are recovered; invalid commands are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ferrorpc.cli import run as run_module
from ferrorpc.cli.bench import fit as fitting
from ferrorpc.cli.bench.command import command
from ferrorpc.cli.bench.fit import COLLECTIVES, ROUND_TRIP, SEND, Case, fit, folding_seconds_per_byte, least_squares
from ferrorpc.cli.main import run
from ferrorpc.collectives.predict import predict
from ferrorpc.wire.cost_table import Costs, parse

COSTS = Costs(1e-4, 2e-5, 1e-9, 3e-10)
FEW = 2
"""Processors for all ranks."""
CASES = [
    Case(operation, algorithm, nbytes)
    for operation, algorithm in COLLECTIVES
    for nbytes in (1 << 10, 1 << 15, 1 << 20, 1 << 23)
] + [Case(SEND, ROUND_TRIP, nbytes) for nbytes in (1 << 10, 1 << 15, 1 << 20)]


def times(ranks: int, processors: int | None = None, costs: Costs = COSTS) -> list[float]:
    costs = replace(costs, processors=processors)
    return [predict(case.entry, case.call(ranks), ranks, costs).seconds for case in CASES]


@pytest.mark.parametrize(("ranks", "processors"), [(3, None), (4, FEW)])
def test_the_figures_that_made_the_times_are_found(ranks, processors):
    found = fit(ranks, CASES, times(ranks, processors), COSTS.gamma_seconds_per_byte, processors)
    assert found.figures() == pytest.approx(COSTS.figures(), rel=1e-2)


def test_between_two_ranks_with_processors_enough_a_round_is_a_message_and_only_their_sum_is_known():
    found = fit(2, CASES, times(2), COSTS.gamma_seconds_per_byte, None)
    assert found.alpha_seconds + found.message_seconds == pytest.approx(1.2e-4, rel=1e-2)
    assert found.beta_seconds_per_byte == pytest.approx(COSTS.beta_seconds_per_byte, rel=1e-2)


def test_where_processors_are_short_what_is_work_shows_between_two_ranks():
    """A message alone takes alpha and its work; two at once take the work of both ends of both on both processors."""
    busy = Costs(1e-5, 2e-4, 1e-9, 1e-10)
    found = fit(2, CASES, times(2, FEW, busy), busy.gamma_seconds_per_byte, FEW)
    assert found.figures() == pytest.approx(busy.figures(), rel=1e-2)


def test_an_answer_takes_as_long_as_what_it_answers():
    case = Case(SEND, ROUND_TRIP, 4000)
    for ranks in (2, 4):
        assert predict(case.entry, case.call(ranks), ranks, COSTS).seconds == pytest.approx(2 * (1.2e-4 + 4000e-9))


def test_small_times_count_as_much_as_large_ones():
    noisy = [each * (1.2 if place % 2 else 0.8) for place, each in enumerate(times(4))]
    found = fit(4, CASES, noisy, COSTS.gamma_seconds_per_byte, None)
    for again, real in zip(times(4, None, found), times(4), strict=True):
        assert 0.5 < again / real < 2


def test_folding_takes_time():
    assert 1e-13 < folding_seconds_per_byte() < 1e-6


def test_no_figure_is_negative():
    rows, targets = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([3.0, 2.0, 1.0])
    found = least_squares(rows, targets, targets)
    assert (found >= 0).all()
    assert found[1] == 0
    assert found[0] > 0


def test_the_command_writes_a_table_that_can_be_read(tmp_path, monkeypatch):
    def measured(worlds):
        return {ranks: [1e-4 * ranks + 1e-9 * case.nbytes for case in cases] for ranks, cases in worlds.items()}

    monkeypatch.setattr(fitting, "measure", measured)
    path = tmp_path / "costs.json"
    result = CliRunner().invoke(command, ["--fit", str(path), "--ranks", "3,2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    table = parse(path.read_text())
    assert sorted(table.rows) == [2, 3]
    assert f"--cost-table {path}" in result.output


@pytest.mark.parametrize(("ranks_end", "code"), [(130, 130), (1, 64)])
def test_ctrl_c_is_no_measurement_that_failed(tmp_path, monkeypatch, capfd, ranks_end, code):
    monkeypatch.setattr(run_module, "launch", lambda plan, environment: ranks_end)
    assert run(["bench", "--fit", str(tmp_path / "costs.json")]) == code
    assert ("could not be measured: exit code 1" in capfd.readouterr().err) == (code == 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fit", "x", "--ranks", "1"], "of at least 2"),
        (["--fit", "x", "barrier"], "separate measurement"),
        (["--ranks", "2"], "what --fit FILE measures"),
        ([], "--fit"),
    ],
)
def test_what_the_group_of_measurements_says(arguments, words):
    assert words in CliRunner().invoke(command, arguments).output
