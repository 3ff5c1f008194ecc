"""The wrapper's names are the module's own, whichever of torch's methods gives or takes them."""

from __future__ import annotations

import pytest

from ferrorpc.errors import UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from ferrorpc.torch import DistributedDataParallel  # noqa: E402


def _net():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)))


def test_the_names_of_parameters_and_buffers_find_them():
    def body(group):
        ddp = DistributedDataParallel(_net(), group)
        assert all(ddp.get_parameter(name) is parameter for name, parameter in ddp.named_parameters())
        assert all(ddp.get_buffer(name) is buffer for name, buffer in ddp.named_buffers())
        assert ddp.get_parameter("module.0.weight") is ddp.module[0].weight
        with pytest.raises(AttributeError):
            ddp.get_parameter("2.weight")
        return True

    assert run_world(2, body) == [True, True]


def test_names_of_modules_join_to_those_of_their_parameters():
    """As recipes for weight decay do it."""

    def body(group):
        ddp = DistributedDataParallel(_net(), group)
        for within, names in ((ddp, ""), (torch.nn.ModuleDict({"model": ddp}), "model.")):
            joined = {
                f"{name}.{each}" if name else each: parameter
                for name, part in within.named_modules()
                for each, parameter in part.named_parameters(recurse=False)
            }
            assert joined.keys() == {f"{names}{each}" for each in ddp.module.state_dict() if "weight" in each or "bias" in each}
            assert joined == dict(within.named_parameters())
        return True

    assert run_world(2, body) == [True, True]


def test_the_names_of_modules_find_them():
    def body(group):
        ddp = DistributedDataParallel(_net(), group)
        assert [part for _, part in ddp.named_modules()] == [ddp, *ddp.module.modules()]
        assert list(ddp.modules()) == [ddp, *ddp.module.modules()]
        assert all(ddp.get_submodule(name) is part for name, part in ddp.named_modules() if name)
        assert ddp.get_submodule("") is ddp
        assert ddp.get_submodule("module.1") is ddp.module[1]
        twice = torch.nn.ModuleList([ddp, ddp])
        assert len(list(twice.modules())) == 2 + len(list(ddp.module.modules()))
        assert len(list(twice.named_modules(remove_duplicate=False))) == 1 + 2 * len(list(ddp.modules()))
        return True

    assert run_world(2, body) == [True, True]


def test_a_module_set_on_the_wrapper_in_place_of_one_of_the_modules_is_refused():
    """It would be set, and the wrapped module would not use it."""

    def body(group):
        net = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 1)})
        ddp = DistributedDataParallel(net, group)
        with pytest.raises(UsageError, match=r"'head' is a part of the module(.|\n)*ddp\.module"):
            ddp.head = torch.nn.Linear(3, 2)
        ddp.extra = torch.nn.Identity()
        return True

    assert run_world(1, body) == [True]
