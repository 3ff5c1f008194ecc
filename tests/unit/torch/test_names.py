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


def test_parameters_that_are_set_on_the_wrapper_are_refused():
    """They would be neither trained nor saved."""

    def body(group):
        ddp = DistributedDataParallel(_net(), group)
        for part in (torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1))):
            with pytest.raises(UsageError, match="'margin' has parameters, but was set on the wrapper"):
                ddp.margin = part
        ddp.criterion = torch.nn.MSELoss()
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


def test_names_that_a_module_around_wrappers_gives_lead_through_them():
    """As torch.distributed.checkpoint follows them, which asks for one attribute after the other."""

    def body(group):
        outer = torch.nn.ModuleDict({"net": _net(), "head": torch.nn.Linear(1, 1)})
        names = [name for name, _ in [*outer.named_parameters(), *outer.named_buffers()]]
        outer.update({name: DistributedDataParallel(part, group) for name, part in outer.items()})
        assert [name for name, _ in [*outer.named_parameters(), *outer.named_buffers()]] == names
        assert all(outer.get_parameter(name) is parameter for name, parameter in outer.named_parameters())
        assert all(outer.get_buffer(name) is buffer for name, buffer in outer.named_buffers())
        assert all(outer.get_submodule(name) is part for name, part in outer.named_modules() if "." in name)
        with pytest.raises(AttributeError, match=r"no attribute 'sync_gradients'\ntry: leave it out: backward\(\) averages"):
            outer["net"].sync_gradients()
        with pytest.raises(AttributeError, match=r"DistributedDataParallel.* has no attribute .tail"):
            outer.get_submodule("head.tail")
        return True

    assert run_world(2, body) == [True, True]


def test_what_torch_does_with_each_part_it_does_with_the_module_too():
    def body(group):
        for net in (_net(), torch.nn.Linear(3, 1)):
            wrapper, seen = DistributedDataParallel(net, group), []
            assert [name for name, _ in wrapper.named_children()] == [name for name, _ in net.named_children()]
            assert not wrapper.eval().module.training
            assert all(parameter.dtype is torch.float64 for parameter in wrapper.double().parameters())
            wrapper.apply(seen.append)
            assert seen[-2:] == [net, wrapper]
        return True

    assert run_world(1, body) == [True]


def test_torchs_own_checkpoints_take_the_wrapper_and_modules_around_it():
    state = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def body(group):
        wrapper = DistributedDataParallel(_net(), group)
        for module in (wrapper, torch.nn.ModuleDict({"net": wrapper})):
            saved = state.get_model_state_dict(module)
            assert saved.keys() == module.state_dict().keys()
            state.set_model_state_dict(module, saved)
            optimizer = torch.optim.AdamW(module.parameters())
            wrapper(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            moments = state.get_optimizer_state_dict(module, optimizer)
            again = torch.optim.AdamW(module.parameters())
            state.set_optimizer_state_dict(module, again, moments)
            assert len(again.state) == len(moments["state"]) == 6
        return True

    assert run_world(1, body) == [True]


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


def test_hooks_of_states_are_those_of_the_module():
    def body(group):
        ddp, seen = DistributedDataParallel(torch.nn.Linear(3, 1), group), []
        ddp.register_state_dict_pre_hook(lambda *given: seen.append("before saving"))
        ddp.register_state_dict_post_hook(lambda *given: seen.append("after saving"))
        ddp.register_load_state_dict_pre_hook(lambda *given: seen.append("before loading"))
        ddp.register_load_state_dict_post_hook(lambda *given: seen.append("after loading"))
        state = ddp.state_dict()
        assert seen == ["before saving", "after saving"]
        seen.clear()
        torch.nn.ModuleDict({"net": ddp}).load_state_dict({f"net.{name}": value for name, value in state.items()})
        assert seen == ["before loading", "after loading"]
        with pytest.raises(UsageError, match="'scale' has parameters, but was set on the wrapper"):
            ddp.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
        return True

    assert run_world(1, body) == [True]
