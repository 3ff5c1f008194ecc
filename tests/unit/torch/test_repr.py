"""The reprs of ferrorpc.torch's objects."""

from __future__ import annotations

import pytest

from ferrorpc.testing import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from ferrorpc.torch import DistributedDataParallel, Stage, ZeroOptimizer  # noqa: E402


def test_a_wrapper_shows_its_rank_beside_its_module() -> None:
    shown = run_world(2, lambda group: repr(DistributedDataParallel(torch.nn.Linear(2, 3), group)))[1]
    assert "2 parameters that train, rank 1 of 2" in shown
    assert "Linear(in_features=2, out_features=3, bias=True)" in shown


def test_a_stage_shows_what_module_it_is_of() -> None:
    assert repr(Stage(torch.nn.Linear(2, 3))) == "<Stage of Linear>"
    assert repr(Stage(torch.nn.Tanh(), split=False)) == "<Stage of Tanh, backward in one>"


def test_an_optimizer_shows_whose_it_is() -> None:
    def body(group):
        return repr(ZeroOptimizer(torch.nn.Linear(2, 3).parameters(), torch.optim.SGD, group, lr=0.5))

    shown = run_world(1, body)[0]
    assert shown.startswith("ZeroOptimizer of SGD, rank 0 of 1 (")
    assert "lr: 0.5" in shown
