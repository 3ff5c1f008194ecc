"""The check in each step whether a module's parameters have changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from ferrorpc.torch.parameter_snapshot import ParameterSnapshot  # noqa: E402


def model() -> nn.Sequential:
    """With a frozen parameter, and one that is None."""
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    made[0].bias.requires_grad_(False)
    return made


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "added": lambda module: module.append(nn.Linear(2, 2)),
    "replaced": lambda module: setattr(module[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "taken away": lambda module: delattr(module[0], "weight"),
    "set to None": lambda module: setattr(module[0], "weight", None),
    "frozen": lambda module: module[0].weight.requires_grad_(False),
    "thawed": lambda module: module[0].bias.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_until_it_is_known(change: Callable[[nn.Sequential], object]) -> None:
    module = model()
    snapshot = ParameterSnapshot(module)
    module(torch.ones(3, 2)).sum().backward()
    assert not snapshot.may_differ(), "a step is no change"
    change(module)
    assert snapshot.may_differ()
    snapshot.take()
    assert not snapshot.may_differ()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_modules_do_not_keep_their_parameters_in_a_dict() -> None:
    module = torch.jit.script(nn.Linear(2, 2))
    snapshot = ParameterSnapshot(module)
    assert not snapshot.may_differ()
    module.weight.requires_grad_(False)
    assert snapshot.may_differ()
