"""Wrong options of benchmarks: they are refused before anything is measured."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from benchmarks import compare, kernels, link, predictions
from ferrorpc.cli.bench.command import command


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (compare.main, "--rounds 0", "'0' is no whole number of at least 1"),
        (compare.main, "--restarts -1", "'-1' is no whole number of at least 1"),
        (compare.main, "--seconds 0", "'0' is no number above 0"),
        (compare.main, "--seconds nan", "'nan' is no number above 0"),
        (kernels.main, "--mib inf", "'inf' is no number above 0"),
        (kernels.main, "--sources two", "'two' is no whole number of at least 1"),
        (link.main, "--size big", "'big' is no size of at least 4 bytes"),
        (link.main, "--size 0", "'0' is no size of at least 4 bytes"),
        (predictions.main, "--ranks 2 --fitted-at 2", "two different numbers of at least 2"),
    ],
)
def test_it_is_refused(main, words: str, message: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_transport_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(command, ["all_reduce", "--transports", "grpc,tcp"])
    assert result.exit_code == 2
    assert "expected some of auto, grpc, shared_memory" in result.output


@pytest.mark.parametrize("sizes", ["0", "64,3", "big", ""])
def test_sizes_without_an_element_are_refused(sizes: str) -> None:
    result = CliRunner().invoke(command, ["all_reduce", "--sizes", sizes])
    assert result.exit_code == 2
    assert "--sizes" in result.output
