"""The torch ZeroOptimizer, compared with torch's own optimizer in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ferrorpc.errors import GroupAbortedError, UsageError  # noqa: E402
from ferrorpc.torch import ZeroOptimizer  # noqa: E402
from tests.unit.ddp.world import run_world  # noqa: E402
from tests.unit.torch.models import batch, gradients, network  # noqa: E402

KINDS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
]
STEPS = 4


def backward(module, rank, step):
    module.zero_grad()
    module(batch(rank, step)).square().sum().backward()


def whole(size, kind, options):
    module = network()
    optimizer = kind(module.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        parts = []
        for rank in range(size):
            backward(module, rank, step)
            parts.append(gradients(module))
        for name, parameter in module.named_parameters():
            parameter.grad = sum(part[name] for part in parts) / size
        optimizer.step()
        scheduler.step()
    held = sum(v.numel() * 4 for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    return module, held


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_weights_are_those_of_torchs_own_optimizer(size, kind, options):
    def body(group):
        module = network()
        optimizer = ZeroOptimizer(module.parameters(), kind, group, bucket_cap_mb=5e-4, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(STEPS):
            backward(module, group.rank, step)
            optimizer.step()
            scheduler.step()
        return module.state_dict()

    expected, _ = whole(size, kind, options)
    results = run_world(size, body)
    for state in results:
        for name, weights in expected.state_dict().items():
            torch.testing.assert_close(state[name], weights, rtol=1e-6, atol=1e-7)
            assert torch.equal(state[name], results[0][name])


def test_shards_are_on_the_host_whatever_the_default_device_is():
    def body(group, device):
        module = network()
        with torch.device(device):
            optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, group, lr=0.1, momentum=0.9)
        for step in range(2):
            backward(module, group.rank, step)
            with torch.device(device):
                optimizer.step()
                optimizer.load_state_dict(optimizer.gather_state_dict())
        return module.state_dict()

    wanted, found = (run_world(1, lambda group, device=device: body(group, device))[0] for device in ("cpu", "meta"))
    assert all(torch.equal(found[name], weights) for name, weights in wanted.items())


def test_a_rank_holds_its_share_of_the_optimizers_memory():
    def body(group):
        module = network(widths=(60, 160, 120, 30))
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, group)
        module(batch(group.rank, width=60)).sum().backward()
        optimizer.step()
        return optimizer.memory_bytes, 8 * sum(each.numel() for each in module.parameters())

    for held, everything in run_world(4, body):
        assert abs(held - everything / 4) <= 0.05 * everything / 4


def test_groups_of_parameters_keep_their_settings_and_state_goes_on_where_it_was():
    def body(group):
        module = network()
        first, *others = module.parameters()
        groups = [{"params": [first], "lr": 0.0}, {"params": others}]
        optimizer = ZeroOptimizer(groups, torch.optim.Adam, group, lr=0.01)
        frozen, moved = first.detach().clone(), others[0].detach().clone()
        backward(module, group.rank, 0)
        optimizer.step()
        assert torch.equal(first, frozen)
        assert not torch.equal(others[0], moved)
        state = optimizer.state_dict()
        again = ZeroOptimizer([{"params": [first]}, {"params": others}], torch.optim.Adam, group, lr=0.01)
        again.load_state_dict(state)
        assert again.param_groups[0]["lr"] == 0.0
        assert again.memory_bytes == optimizer.memory_bytes
        with pytest.raises(UsageError, match="cut into shards"):
            again.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})

    run_world(2, body)


def test_frozen_parameters_are_left_as_they_are_and_thawed_ones_are_an_error():
    """Weight decay would update them, too."""

    def trained(module, make):
        module[0].requires_grad_(False)
        optimizer = make([{"params": module[0].parameters()}, {"params": module[2:].parameters()}])
        for _ in range(2):
            optimizer.zero_grad()
            module(batch(0)).square().sum().backward()
            optimizer.step()
        return optimizer

    def body(group):
        module = network()
        optimizer = trained(module, lambda groups: ZeroOptimizer(groups, torch.optim.AdamW, group, lr=0.1, weight_decay=0.5))
        found = {name: weights.clone() for name, weights in module.state_dict().items()}
        module[0].requires_grad_(True)
        module(batch(0)).square().sum().backward()
        with pytest.raises(UsageError, match="was frozen when"):
            optimizer.step()
        return found

    alone = network()
    trained(alone, lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5))
    for found in run_world(2, body):
        for name, weights in alone.state_dict().items():
            torch.testing.assert_close(found[name], weights)


@pytest.mark.parametrize("init_sync", [True, False])
def test_ranks_begin_with_the_parameters_of_the_first_frozen_ones_too(init_sync):
    def body(group):
        model = torch.nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(10.0 + group.rank)
        before = [parameter._version for parameter in model.parameters()]
        ZeroOptimizer(model.parameters(), torch.optim.SGD, group, init_sync=init_sync, lr=0.1)
        counted = all(parameter._version > version for parameter, version in zip(model.parameters(), before, strict=True))
        return [parameter.flatten()[0].item() for parameter in model.parameters()], counted

    first, second = run_world(2, body)
    assert first[0] == [10.0, 10.0]
    assert second == ([10.0, 10.0] if init_sync else [11.0, 11.0], init_sync), "a graph from before must not go on"


def test_a_state_of_a_group_of_another_size_is_refused():
    """It would belong to other weights."""

    def saved(group):
        module = network()
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, group)
        backward(module, group.rank, 0)
        optimizer.step()
        return optimizer.state_dict()

    states = run_world(3, saved)

    def body(group):
        optimizer = ZeroOptimizer(network().parameters(), torch.optim.Adam, group)
        with pytest.raises(
            UsageError, match=rf"of rank {group.rank} of 3, and this is rank {group.rank} of 2\n.*each rank's own"
        ):
            optimizer.load_state_dict(states[group.rank])

    run_world(2, body)


def test_a_state_of_another_rank_is_refused():
    def body(group):
        module = network()
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, group)
        backward(module, group.rank, 0)
        optimizer.step()
        others = optimizer.state_dict() | {"rank": [1 - group.rank, 2]}
        with pytest.raises(UsageError, match=f"that of rank {1 - group.rank} of 2, and this is rank {group.rank} of 2"):
            optimizer.load_state_dict(others)

    run_world(2, body)


class Scaled(torch.nn.Module):
    """With parameters of every kind of shape: matrices, vectors, a number, one without elements, a frozen one."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.network[0].bias.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.network(x) * self.scale + self.nothing.sum()

    @property
    def groups(self):
        return [{"params": self.network.parameters()}, {"params": [self.scale, self.nothing], "lr": 0.02}]


def trained(module, optimizer, steps):
    """All ranks have the same batches, so that means of 1, 2 or 4 of them have the same bits."""
    for step in steps:
        backward(module, 0, step)
        optimizer.step()


def close(module, expected):
    for name, weights in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*KINDS, (torch.optim.NAdam, {"lr": 0.01}), (torch.optim.Rprop, {"lr": 0.01}), (torch.optim.ASGD, {"lr": 0.01})],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_gathered_state_goes_on_in_groups_of_any_size_and_in_torchs_own_optimizer(kind, options):
    expected = Scaled()
    trained(expected, kind(expected.groups, **options), range(8))
    module = Scaled()
    own = kind(module.groups, **options)
    trained(module, own, range(2))
    state = own.state_dict()

    def body(group, weights, saved, steps, cap):
        module = Scaled()
        module.load_state_dict(weights)
        optimizer = ZeroOptimizer(module.groups, kind, group, bucket_cap_mb=cap, **options)
        optimizer.load_state_dict(saved)
        trained(module, optimizer, steps)
        return module.state_dict(), optimizer.gather_state_dict(root=group.size - 1)

    for size, steps, cap in [(4, (2, 3), 25), (2, (4, 5), 5e-4)]:
        before = module.state_dict(), state, steps, cap
        *others, (weights, state) = run_world(size, lambda group, before=before: body(group, *before))
        assert [each for _, each in others] == [None] * (size - 1)
        module.load_state_dict(weights)
    last = kind(module.groups, **options)
    last.load_state_dict(state)
    trained(module, last, (6, 7))
    close(module, expected)


def test_states_of_torchs_own_optimizer_that_cannot_be_joined_are_refused():
    def adam(parameters, *grads):
        optimizer = torch.optim.Adam(parameters)
        for each in grads:
            for parameter, grad in zip(parameters, each, strict=True):
                parameter.grad = None if grad is None else torch.full_like(parameter, grad)
            optimizer.step()
        return optimizer.state_dict()

    def pair(*shapes):
        return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]

    states = [
        (adam(pair(3, 4, 5), (1, 1, 1)), r"groups of \[3\] parameters, and this optimizer has \[2\]"),
        (adam(pair(3, 4), (1, None)), r"no step for parameter1\n.*until each has had a gradient"),
        (adam(pair(3, 5), (1, 1)), r"exp_avg has shape \(5,\) for parameter1, whose own is \(4,\)"),
        (adam(pair(3, 4), (1, 1), (1, None)), r"step is 1.0 for parameter1 and 2.0 for parameter0.*\n.*smaller bucket_cap_mb"),
    ]

    def body(group):
        optimizer = ZeroOptimizer(pair(3, 4), torch.optim.Adam, group)
        for state, message in states:
            with pytest.raises(UsageError, match=message):
                optimizer.load_state_dict(state)
        assert optimizer.memory_bytes == 0

    run_world(2, body)


def test_a_gradient_that_cannot_be_sent_is_refused_before_those_of_other_groups_are_sent():
    def body(group):
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = ZeroOptimizer([{"params": [first]}, {"params": [second]}], torch.optim.SGD, group, lr=1.0)
        first.grad, second.grad = torch.full((3,), 1.0), torch.full((3,), 3.0)
        if group.rank == 1:
            dense, second.grad = second.grad, second.grad.to_sparse()
            with pytest.raises(UsageError, match="sparse"):
                optimizer.step()
            second.grad = dense
        optimizer.step()
        return first.tolist(), second.tolist()

    assert run_world(2, body) == [([-1.0] * 3, [-3.0] * 3)] * 2


def test_an_optimizer_that_fails_on_one_rank_is_what_the_others_hear_of():
    """They wait for its weights."""

    def body(group):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = ZeroOptimizer([weight], torch.optim.SGD, group, lr=1.0)
        if group.rank == 1:
            optimizer.param_groups[0]["lr"] = "fast"
        weight.grad = torch.ones(3)
        with pytest.raises(TypeError if group.rank == 1 else GroupAbortedError):
            optimizer.step()
        with pytest.raises(GroupAbortedError) as caught:
            group.barrier()
        return caught.value.rank

    assert run_world(2, body) == [1, 1]


def test_a_closure_may_compute_gradients_also_where_a_loop_needs_none():
    def body(group):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = ZeroOptimizer([weight], torch.optim.SGD, group, lr=0.5)

        def closure():
            optimizer.zero_grad()
            loss = (weight * (group.rank + 1)).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            return optimizer.step(closure).item(), weight.tolist()

    assert run_world(2, body) == [(3.0, [0.25] * 3), (6.0, [0.25] * 3)]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_may_be_parts_of_a_graph_as_for_torchs_own():
    def body(group):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = ZeroOptimizer([weight], torch.optim.SGD, group, lr=0.25)
        weight.square().sum().backward(create_graph=True)
        optimizer.step()
        return weight.tolist()

    assert run_world(1, body) == [[0.5] * 3]


def test_a_gathered_state_of_numbers_alone_goes_on():
    """Shapes do not distinguish per-element state from common state."""

    def made():
        return [torch.nn.Parameter(torch.tensor(value)) for value in (0.5, -2.0)]

    def moved(weights, optimizer):
        for number, weight in enumerate(weights):
            weight.grad = torch.tensor(1.0 + number)
        optimizer.step()

    def body(group):
        weights = made()
        optimizer = ZeroOptimizer(weights, torch.optim.Adam, group, lr=0.1)
        moved(weights, optimizer)
        again = ZeroOptimizer(weights, torch.optim.Adam, group)
        again.load_state_dict(optimizer.gather_state_dict())
        moved(weights, again)
        return [weight.item() for weight in weights]

    expected = made()
    optimizer = torch.optim.Adam(expected, lr=0.1)
    for _ in range(2):
        moved(expected, optimizer)
    assert run_world(1, body) == [pytest.approx([weight.item() for weight in expected])]


def test_a_state_gathered_before_the_first_step_remembers_nothing():
    def body(group):
        optimizer = ZeroOptimizer(network().parameters(), torch.optim.Adam, group, lr=0.5)
        state = optimizer.gather_state_dict()
        if group.rank:
            assert state is None
        else:
            assert state == torch.optim.Adam(network().parameters(), lr=0.5).state_dict()

    run_world(2, body)


class Counting(torch.optim.Optimizer):
    """Its steps become smaller. It counts them in its group, and in a state that belongs to no parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            self.state["all"] = {"count": group["count"]}
            for parameter in group["params"]:
                parameter.sub_(group["lr"] / group["count"] * parameter.grad)


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_optimizer_may_count_its_steps_in_its_groups_and_beside_its_parameters(is_whole):
    def body(group):
        weight = torch.nn.Parameter(torch.zeros(3))
        weight.grad = torch.ones(3)
        saved = None
        for _ in range(2):
            optimizer = ZeroOptimizer([weight], Counting, group, lr=12.0)
            if saved is not None:
                optimizer.load_state_dict(saved)
            optimizer.step()
            optimizer.step()
            gathered = [optimizer.gather_state_dict(root) for root in range(group.size)][group.rank]
            saved = gathered if is_whole else optimizer.state_dict()
        assert gathered["state"]["all"] == {"count": 4}
        return weight.tolist()

    assert run_world(2, body) == [[-12.0 - 6.0 - 4.0 - 3.0] * 3] * 2


def test_a_state_of_other_groups_of_parameters_is_refused():
    def body(group):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(3))]} for _ in range(2)]
        state = ZeroOptimizer(groups, torch.optim.SGD, group, lr=1.0).state_dict()
        other = ZeroOptimizer(groups[:1], torch.optim.SGD, group, lr=1.0)
        with pytest.raises(UsageError, match="not this optimizer's: it has 'group 1' where this one has 'nothing'"):
            other.load_state_dict(state)
        del state["layout"]  # as it was saved once
        with pytest.raises(UsageError, match="the state: "):
            other.load_state_dict(state)

    run_world(1, body)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_of_whole_parameters_are_refused(kind):
    def body(group):
        with pytest.raises(UsageError, match=f"{kind.__name__} looks at whole parameters"):
            ZeroOptimizer(network().parameters(), kind, group, lr=0.1)

    run_world(2, body)


def resumed(module, make, step):
    """Two steps, a checkpoint, and two more steps in new objects, under a schedule that also changes Adam's betas."""
    saved = None
    for first in (0, 2):
        optimizer = make(module.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        if saved is not None:
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        for number in (first, first + 1):
            step(module, optimizer, number)
            scheduler.step()
        saved = optimizer.state_dict(), scheduler.state_dict()
    return module.state_dict(), optimizer.param_groups[0]["lr"]


def test_a_schedule_goes_on_where_it_was_when_the_state_was_saved():
    """The state includes what the scheduler wrote after the last step."""
    size = 2

    def body(group):
        def step(module, optimizer, number):
            backward(module, group.rank, number)
            optimizer.step()

        return resumed(network(), lambda weights: ZeroOptimizer(weights, torch.optim.AdamW, group, lr=0.1), step)

    def alone(module, optimizer, number):
        optimizer.zero_grad()
        for rank in range(size):
            (module(batch(rank, number)).square().sum() / size).backward()
        optimizer.step()

    expected, rate = resumed(network(), lambda weights: torch.optim.AdamW(weights, lr=0.1), alone)
    for found, reached in run_world(size, body):
        assert reached == rate
        for name, weights in expected.items():
            torch.testing.assert_close(found[name], weights)
