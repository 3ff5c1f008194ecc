"""Fitting a cost table: figures that made the times are found again, and what the command refuses."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from ferrorpc.cli.bench import fit as fitting
from ferrorpc.cli.bench.command import command
from ferrorpc.cli.bench.fit import MOVES, Case, fit, least_squares
from ferrorpc.collectives.call import example
from ferrorpc.collectives.predict import predict
from ferrorpc.wire.cost_table import Costs, parse

COSTS = Costs(1e-4, 2e-5, 1e-9, 3e-10)
CASES = [
    Case(operation, algorithm, nbytes) for operation, algorithm in MOVES for nbytes in (1 << 10, 1 << 15, 1 << 20, 1 << 23)
]


def times(ranks: int, costs: Costs = COSTS) -> list[float]:
    return [predict(case.entry, example(case.operation, case.nbytes, ranks), ranks, costs).seconds for case in CASES]


def test_the_figures_that_made_the_times_are_found():
    found = fit(4, CASES, times(4))
    for name in Costs.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-2), name


def test_between_two_ranks_a_round_is_a_message_and_only_their_sum_is_known():
    found = fit(2, CASES, times(2))
    assert found.alpha_seconds + found.message_seconds == pytest.approx(1.2e-4, rel=1e-2)
    assert found.beta_seconds_per_byte == pytest.approx(COSTS.beta_seconds_per_byte, rel=1e-2)


def test_small_times_count_as_much_as_large_ones():
    noisy = [each * (1.2 if place % 2 else 0.8) for place, each in enumerate(times(4))]
    found = fit(4, CASES, noisy)
    for again, real in zip(times(4, found), times(4), strict=True):
        assert 0.5 < again / real < 2


def test_no_figure_is_negative():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = least_squares(rows, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all()
    assert found[1] == 0
    assert found[0] > 0


def test_the_command_writes_a_table_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "measure", lambda ranks, cases, seconds: [1e-4 * ranks + 1e-9 * case.nbytes for case in cases])
    path = tmp_path / "costs.json"
    result = CliRunner().invoke(command, ["--fit", str(path), "--ranks", "3,2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    table = parse(path.read_text())
    assert sorted(table.lanes["grpc"]) == [2, 3]
    assert f"--cost-table {path}" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--fit", "x", "--ranks", "1"], "from 2 on"), (["--fit", "x", "barrier"], "of its own"), ([], "--fit")],
)
def test_what_the_group_of_measurements_says(arguments, words):
    assert words in CliRunner().invoke(command, arguments).output
