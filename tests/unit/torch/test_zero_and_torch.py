"""What torch's own optimizers do, ZeroOptimizer does too: frozen weights, memory order, graphs from before a step."""

from __future__ import annotations

import copy

import pytest

from ferrorpc.errors import CollectiveMismatchError, GroupAbortedError, UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from ferrorpc.torch import ZeroOptimizer  # noqa: E402


def test_a_parameter_that_is_frozen_later_keeps_its_value():
    initial = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))

    def body(group):
        net = copy.deepcopy(initial)
        optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.1)

        def step():
            optimizer.zero_grad()
            net(torch.ones(2, 3)).pow(2).mean().backward()
            optimizer.step()

        step()
        net[0].requires_grad_(False)
        frozen, other = net[0].weight.clone(), net[1].weight.clone()
        step()
        assert not torch.equal(net[1].weight, other)
        return torch.equal(net[0].weight, frozen)

    assert run_world(2, body) == [True, True]


def test_a_gathered_state_has_the_memory_order_of_the_parameters():
    """torch's fused optimizers go through memory, whatever the strides are."""

    initial = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)

    def body(group):
        net, plain = copy.deepcopy(initial), copy.deepcopy(initial)
        zero = ZeroOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.01)
        own = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)

        def step(module, optimizer):
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            optimizer.step()

        for _ in range(2):
            step(net, zero)
            step(plain, own)
        state = zero.gather_state_dict(0)
        if group.rank:
            return None
        assert state["state"][0]["exp_avg"].stride() == own.state[plain.weight]["exp_avg"].stride()
        resumed = copy.deepcopy(plain)
        again = torch.optim.AdamW(resumed.parameters(), lr=0.01, fused=True)
        again.load_state_dict(state)
        for _ in range(2):
            step(plain, own)
            step(resumed, again)
        return torch.allclose(plain.weight, resumed.weight, atol=1e-6)

    assert run_world(2, body)[0] is True


def test_a_gathered_state_keeps_its_dtype_where_the_parameter_has_another_memory_order():
    class Thirds(torch.optim.SGD):
        def step(self, closure=None):
            for shard in self.param_groups[0]["params"]:
                self.state[shard]["third"] = shard.grad.double() / 3

    def body(group):
        weight = torch.nn.Parameter(torch.zeros(4, 3).t())
        optimizer = ZeroOptimizer([weight], Thirds, group, lr=1.0)
        weight.grad = torch.ones(3, 4)
        optimizer.step()
        return optimizer.gather_state_dict()

    third = run_world(2, body)[0]["state"][0]["third"]
    assert third.stride() == (1, 3)
    assert torch.equal(third, torch.full((3, 4), 1 / 3, dtype=torch.float64))


def test_a_graph_from_before_a_step_cannot_be_used_after_it():
    def body(group):
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, group, lr=0.5)
        out = net(torch.ones(2, 3))
        out.mean().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.pow(2).mean().backward()
        return True

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("halves", [(0,), (0, 1)])
def test_a_state_of_another_dtype_is_converted_by_value(halves):
    """The bits of bfloat16 were taken for integers."""
    initial = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))

    def step(module, optimizer):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()

    earlier = copy.deepcopy(initial)
    for half in halves:
        earlier[half].bfloat16()
    before = torch.optim.AdamW(earlier.parameters(), lr=0.01)
    step(earlier, before)
    state = before.state_dict()

    plain = copy.deepcopy(initial)
    own = torch.optim.AdamW(plain.parameters(), lr=0.01)
    own.load_state_dict(copy.deepcopy(state))  # it writes what it is given
    step(plain, own)

    def body(group):
        net = copy.deepcopy(initial)
        optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.01)
        optimizer.load_state_dict(state)
        step(net, optimizer)
        return net.state_dict()

    for found in run_world(2, body):
        for name, weights in plain.state_dict().items():
            torch.testing.assert_close(found[name], weights)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop])
def test_a_state_of_parameters_that_are_all_numbers_goes_on_where_it_was(kind):
    """By their shapes, NAdam's product and ASGD's rates were taken for tensors with an element for each of the parameter's."""

    def step(weights, optimizer):
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, number + 1.0)
        optimizer.step()
        return [weight.item() for weight in weights]

    expected = [torch.nn.Parameter(torch.tensor(value)) for value in (0.5, 2.0)]
    own = kind(expected, lr=0.1)
    step(expected, own)
    initial, state = copy.deepcopy((expected, own.state_dict()))

    def body(group):
        weights, saved, found = copy.deepcopy(initial), state, []
        for _ in range(2):
            optimizer = ZeroOptimizer(weights, kind, group, lr=0.1)
            optimizer.load_state_dict(saved)
            found.append(step(weights, optimizer))
            saved = [optimizer.gather_state_dict(root) for root in range(group.size)][group.rank]
        return found

    later = [pytest.approx(step(expected, own)) for _ in range(2)]
    assert run_world(2, body) == [later, later]


def test_a_ranks_own_state_is_refused_by_an_optimizer_of_other_parameters():
    """Shards of the same length were taken for each other."""

    def body(group):
        first, second = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in "ab")

        def made(*groups):
            return ZeroOptimizer([{"params": each} for each in groups], torch.optim.Adam, group)

        optimizer = made([first, second])
        first.grad = torch.ones(4, 4)
        optimizer.step()
        state = optimizer.state_dict()
        made([first, second]).load_state_dict({key: value for key, value in state.items() if key != "layout"})
        again = made([first, second])
        again.load_state_dict(state)
        assert again.memory_bytes == optimizer.memory_bytes
        wide, narrow = torch.nn.Parameter(torch.zeros(16)), torch.nn.Parameter(torch.zeros(2))
        others = [([wide, second],), ([first, wide],), ([narrow, first, wide],)]
        for other in others:
            with pytest.raises(UsageError, match=r"not this optimizer's: .*where this one has (.|\n)*same order"):
                made(*other).load_state_dict(state)
        first.requires_grad_(False)
        alone = made([first, second])
        second.requires_grad_(False)
        first.requires_grad_(True)
        with pytest.raises(UsageError, match=r"parameter1.*where this one has .*parameter0"):
            made([first, second]).load_state_dict(alone.state_dict())

    run_world(2, body)


def test_the_state_after_a_step_that_failed_is_refused_until_one_is_loaded():
    """It was a step ahead of the parameters: the step was applied twice when it was taken again."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if self.param_groups[0]["weight_decay"]:
                raise OSError

    def body(group):
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = ZeroOptimizer([weight], Failing, group, lr=1.0, momentum=0.5)
        weight.grad = torch.ones(64)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        if group.rank == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises((OSError, GroupAbortedError)):
            optimizer.step()
        for save in (optimizer.state_dict, optimizer.gather_state_dict) if group.rank == 1 else ():
            with pytest.raises(UsageError, match=r"a step ahead of the weights(.|\n)*load_state_dict"):
                save()
        optimizer.load_state_dict(copy.deepcopy(before))
        with pytest.raises(GroupAbortedError):
            optimizer.step()  # nothing is updated
        return torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])

    assert run_world(2, body) == [True, True]


def test_settings_are_those_that_the_optimizer_has_made_of_what_it_was_given():
    class Scaled(torch.optim.SGD):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr=lr)
            for members in self.param_groups:
                members["lr"] = lr / 4

    def body(group):
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = ZeroOptimizer([parameter], Scaled, group, lr=1.0)
        parameter.grad = torch.ones(3)
        optimizer.step()
        return optimizer.param_groups[0]["lr"], parameter.tolist()

    assert run_world(2, body) == [(0.25, [-0.25] * 3)] * 2


@pytest.mark.parametrize("whole", [False, True], ids=["own", "gathered"])
@pytest.mark.parametrize("of_step", [(3, 2), (3, 0)], ids=["older", "none"])
def test_states_of_different_steps_are_refused_by_the_first_step(of_step, whole):
    initial = torch.nn.Linear(3, 2)

    def body(group):
        net, states = copy.deepcopy(initial), []

        def train(optimizer):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).pow(2).mean().backward()
            optimizer.step()

        def save(optimizer):
            gathered = [optimizer.gather_state_dict(root) for root in range(2)] if whole else []
            states.append(copy.deepcopy(gathered[group.rank] if whole else optimizer.state_dict()))

        optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        for _ in range(3):
            save(optimizer)
            train(optimizer)
        save(optimizer)
        resumed = ZeroOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        if of_step[group.rank]:
            resumed.load_state_dict(states[of_step[group.rank]])
        with pytest.raises(CollectiveMismatchError, match=f"rank 1 has 'that of step {of_step[1]}'.* 'that of step 3'"):
            train(resumed)
        resumed.load_state_dict(states[3])  # the group is open
        train(resumed)

    run_world(2, body)
