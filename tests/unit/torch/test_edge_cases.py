"""Cases that users of data parallelism in torch report as issues elsewhere, tested here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ferrorpc.errors import UsageError
from ferrorpc.testing import FaultPlan, run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ferrorpc.torch import DistributedDataParallel  # noqa: E402
from tests.unit.torch.models import SMALL_MB, batch, check_close, check_same, gradients, network, reference  # noqa: E402


class Branches(nn.Module):
    """Uses the layer that the caller names, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = network(1, (6, 4)), network(2, (4, 2)), network(3, (4, 2))

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.stem(x)
        return {"left": self.left, "right": self.right, "none": nn.Identity()}[branch](x)


@pytest.mark.parametrize("views", [True, False])
def test_expected_to_have_finished_reduction_in_the_prior_iteration(views: bool) -> None:
    """Parameters that are unused on some ranks and in some steps need no flag and no extra traversal of the graph."""
    program = [("left", "right"), ("none", "none"), ("right", "none"), ("left", "left"), ("none", "left")]

    def local(module: nn.Module, step: int, rank: int) -> None:
        module(batch(rank, step), program[step][rank]).square().sum().backward()

    def body(group):
        ddp = DistributedDataParallel(Branches(), group, bucket_cap_mb=5e-5, gradient_as_bucket_view=views)
        found = []
        for step in range(len(program)):
            ddp.zero_grad()
            local(ddp, step, group.rank)
            found.append(gradients(ddp))
        return found

    results = run_world(2, body)
    for step in range(len(program)):
        steps = [found[step] for found in results]
        check_same(steps)
        check_close(steps[0], reference(2, lambda m, rank, s=step: local(m, s, rank), Branches))


@pytest.mark.parametrize("views", [True, False])
def test_the_gradient_of_a_parameter_that_no_rank_used_stays_as_it_was(views: bool) -> None:
    def body(group):
        ddp = DistributedDataParallel(Branches(), group, gradient_as_bucket_view=views)
        ddp(batch(group.rank), "left").square().sum().backward()
        before = gradients(ddp)
        ddp(batch(group.rank, 1), "right").square().sum().backward()
        after = gradients(ddp)
        for name, gradient in before.items():
            if name.startswith("left"):
                assert torch.equal(after[name], gradient)
        assert all(after[name] is not None for name in after)
        return after

    check_same(run_world(3, body))


def test_a_gradient_left_from_before_counts_once_where_only_another_rank_used_the_parameter() -> None:
    """Two backward passes, both averaged: the second's mean is added to the first's, which all ranks have."""

    def body(group):
        ddp = DistributedDataParallel(Branches(), group)
        ddp(batch(group.rank), "left").square().sum().backward()
        ddp(batch(group.rank, 1), "left" if group.rank == 0 else "right").square().sum().backward()
        return gradients(ddp)

    def local(module, rank):
        module(batch(rank), "left").square().sum().backward()
        module(batch(rank, 1), "left" if rank == 0 else "right").square().sum().backward()

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, local, Branches))


class Shuffled(nn.Module):
    """Adds its layers in the order that the caller gives, in which autograd reaches them too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([network(seed, (6, 6)) for seed in range(6)])

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def test_gradients_ready_in_different_order_on_each_rank_neither_hang_nor_mix() -> None:
    """Buckets have numbers, so ranks need not share an order."""
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 3, 1, 4]]

    def body(group):
        ddp = DistributedDataParallel(Shuffled(), group, bucket_cap_mb=5e-5)
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(group.rank), orders[group.rank]).square().sum().backward()
        return gradients(ddp)

    results = run_world(3, body, faults=FaultPlan(delay_seconds=(0.0, 0.1)))
    check_same(results)
    check_close(results[0], reference(3, lambda m, rank: m(batch(rank), orders[rank]).square().sum().backward(), Shuffled))


class Tied(nn.Module):
    """An embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 4, bias=False)
        self.body = network(4, (4, 6))
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight.copy_(network(5, (6, 4))[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x))))


@pytest.mark.parametrize("of_parameters", [False, True])
def test_gradients_that_are_only_asked_for_are_each_ranks_own_affair(of_parameters: bool) -> None:
    """`torch.autograd.grad`, for penalties or forces, may run on one rank alone, without a message."""

    def body(group):
        ddp, found, sent = DistributedDataParallel(network(), group), [], []
        for step in range(3):
            ddp.zero_grad()
            before = ddp.sent_bytes
            for _ in range(group.rank):
                x = batch(group.rank).requires_grad_()
                asked = list(ddp.parameters()) if of_parameters else [x]
                torch.autograd.grad(ddp(x).sum(), asked, create_graph=True)
            sent.append(ddp.sent_bytes - before)
            ddp(batch(group.rank, step)).square().sum().backward()
            found.append(gradients(ddp))
        assert sent == [0, 0, 0]
        return found

    results = run_world(3, body)
    for step in range(3):
        steps = [found[step] for found in results]
        check_same(steps)
        check_close(steps[0], reference(3, lambda m, rank, s=step: m(batch(rank, s)).square().sum().backward()))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = 0.5  # leaves have their tensor under this name
        return x * ctx.variable

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.variable


def test_a_function_of_ones_own_is_not_taken_for_a_leaf() -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        ddp.module.register_forward_hook(lambda _, __, y: Halved.apply(y))
        torch.autograd.grad(ddp(batch(0)).sum(), list(ddp.parameters()))
        return ddp.sent_bytes

    assert run_world(2, body) == [0, 0]


def test_a_backward_pass_to_some_inputs_alone_averages_those() -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        module = ddp.module
        ddp(batch(group.rank)).square().sum().backward(inputs=[module[0].weight])
        assert module[4].bias.grad is None
        return {"weight": module[0].weight.grad.clone()}

    results = run_world(2, body)
    check_same(results)
    wanted = reference(2, lambda m, rank: m(batch(rank)).square().sum().backward())["0.weight"]
    check_close(results[0], {"weight": wanted})


def test_shared_parameters_are_averaged_once() -> None:
    def body(group):
        ddp = DistributedDataParallel(Tied(), group, bucket_cap_mb=5e-5)
        for _ in range(2):
            ddp.zero_grad()
            ddp(batch(group.rank)).square().sum().backward()
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, lambda m, rank: m(batch(rank)).square().sum().backward(), Tied))


class Checkpointed(nn.Module):
    """A layer that three segments share, one of them outside any checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.shared, self.last = network(1, (6, 6)), network(2, (6, 2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.last(self.shared(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_marked_ready_twice_by_reentrant_checkpoints(reentrant: bool) -> None:
    """Its gradient is accumulated in parts, in nested backward passes, and is reduced after the outer pass."""

    def body(group):
        ddp = DistributedDataParallel(Checkpointed(reentrant), group, bucket_cap_mb=5e-5)
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(group.rank)).square().sum().backward()
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    check_close(
        results[0],
        reference(2, lambda m, rank: m(batch(rank)).square().sum().backward(), lambda: Checkpointed(reentrant)),
    )


@dataclass
class Output:
    y: torch.Tensor


class InDataclass(nn.Module):
    """As many re-entrant checkpoints as asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = network(1, (6, 6))

    def forward(self, x: torch.Tensor, segments: int) -> Output:
        x = x.clone().requires_grad_()
        for _ in range(segments):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return Output(x)


def test_outputs_in_a_dataclass_after_different_numbers_of_checkpoints() -> None:
    def local(module: nn.Module, rank: int) -> None:
        module(batch(rank), 1 + rank).y.square().sum().backward()

    def body(group):
        ddp = DistributedDataParallel(InDataclass(), group)
        local(ddp, group.rank)
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, local, InDataclass))


def test_outputs_may_contain_themselves() -> None:
    @dataclass
    class Node:
        y: torch.Tensor
        above: object = None

    class Tree(nn.Linear):
        def forward(self, x):
            root = Node(super().forward(x))
            root.above = [root, Node(2 * root.y, root)]
            return root

    def body(group):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Tree(6, 1), group)
        ddp(batch(group.rank)).above[1].y.sum().backward()
        return ddp.module.weight.grad

    check_close({"g": run_world(2, body)[0]}, {"g": (batch(0) + batch(1)).sum(0, keepdim=True)})


def test_a_portion_that_comes_too_late_is_an_error_that_says_why() -> None:
    def body(group):
        module = Checkpointed(reentrant=False)
        ddp = DistributedDataParallel(module, group, bucket_cap_mb=5e-5)
        ddp(batch(group.rank)).square().sum().backward()
        module.reentrant = True
        with pytest.raises(UsageError, match="use_reentrant=False"):
            ddp(batch(group.rank)).square().sum().backward()

    run_world(1, body)


def test_accumulation_with_uneven_microbatches_averages_the_sums_once() -> None:
    parts = [3, 1]

    def body(group):
        ddp = DistributedDataParallel(network(), group, bucket_cap_mb=SMALL_MB)
        for _ in range(2):
            ddp.zero_grad()
            for part in ddp.accumulate(parts[group.rank]):
                before = ddp.sent_bytes
                (ddp(batch(group.rank, part)).square().sum() / parts[group.rank]).backward()
                assert (ddp.sent_bytes > before) == (part == parts[group.rank] - 1)
        return gradients(ddp)

    def local(module, rank):
        for part in range(parts[rank]):
            (module(batch(rank, part)).square().sum() / parts[rank]).backward()

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, local))


def test_a_parameter_used_only_under_no_sync_is_averaged_with_the_next_step() -> None:
    def body(group):
        ddp = DistributedDataParallel(Branches(), group)
        with ddp.no_sync():
            ddp(batch(group.rank), "left").square().sum().backward()
        ddp(batch(group.rank, 1), "right").square().sum().backward()
        return gradients(ddp)

    def local(module, rank):
        module(batch(rank), "left").square().sum().backward()
        module(batch(rank, 1), "right").square().sum().backward()

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, local, Branches))


@pytest.mark.parametrize("follows", [True, False])
def test_uneven_inputs_neither_hang_nor_bend_the_mean(follows: bool) -> None:
    """A rank without batches counts with weight 0: later means are over the ranks that still have some."""
    counts = [2, 5, 3]

    def body(group):
        ddp = DistributedDataParallel(network(), group, bucket_cap_mb=SMALL_MB)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        with ddp.uneven(optimizer.step if follows else None):
            for step in range(counts[group.rank]):
                optimizer.zero_grad()
                ddp(batch(group.rank, step)).square().sum().backward()
                optimizer.step()
        momenta = {name: optimizer.state[p]["momentum_buffer"] for name, p in ddp.named_parameters()}
        return {name: p.detach().clone() for name, p in ddp.named_parameters()}, momenta

    results = run_world(3, body)
    check_same([weights for weights, _ in results])
    if follows:
        check_same([momenta for _, momenta in results])
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for step in range(5):
        active = [rank for rank in range(3) if counts[rank] > step]
        optimizer.zero_grad()
        (sum(module(batch(rank, step)).square().sum() for rank in active) / len(active)).backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(results[0][0][name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("views", [True, False])
def test_a_rank_that_follows_takes_no_step_with_what_the_others_do_not_use(views: bool) -> None:
    """Its own last gradient of the left layer would move the momentum once more."""

    def body(group):
        ddp = DistributedDataParallel(Branches(), group, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        with ddp.uneven(optimizer.step):
            for step in range(1 + 2 * group.rank):
                optimizer.zero_grad()
                ddp(batch(group.rank, step), "right" if step else "left").square().sum().backward()
                optimizer.step()
        return {name: p.detach().clone() for name, p in ddp.named_parameters()}

    check_same(run_world(2, body))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = network(1, (6, 4)).double(), network(2, (6, 4)).to(torch.bfloat16)
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x.double()) + self.narrow(x.bfloat16()).double() + self.nothing.sum()


def test_mixed_dtypes_and_a_zero_size_parameter() -> None:
    def body(group):
        ddp = DistributedDataParallel(Mixed(), group)
        for _ in range(2):
            ddp.zero_grad()
            ddp(batch(group.rank)).square().sum().backward()
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    assert [tensor.dtype for tensor in results[0].values()] == [torch.float32] + [torch.float64] * 2 + [torch.bfloat16] * 2
    found = {name: tensor.double() for name, tensor in results[0].items()}
    wanted = reference(2, lambda m, rank: m(batch(rank)).square().sum().backward(), Mixed)
    for name, tensor in wanted.items():
        exact = 1e-6 if found[name].dtype is torch.float64 and name.startswith("wide") else 1e-2
        torch.testing.assert_close(found[name], tensor.double(), rtol=exact, atol=exact)


def test_a_parameter_added_after_wrapping_is_an_error_that_names_it() -> None:
    def body(group):
        module = network()
        frozen = next(module.parameters()).requires_grad_(False)
        ddp = DistributedDataParallel(module, group)
        module.append(nn.Linear(3, 2))
        with pytest.raises(UsageError, match=r"'5\.weight' was added"):
            ddp(batch(0))
        del module[-1]
        frozen.requires_grad_(True)
        with pytest.raises(UsageError, match=r"'0\.weight' was frozen"):
            ddp(batch(0))
        frozen.requires_grad_(False)
        module[2].weight = nn.Parameter(torch.zeros(12, 16))
        with pytest.raises(UsageError, match=r"'2\.weight' was replaced(.|\n)*functional_call, use ddp\.module"):
            ddp(batch(0))

    run_world(1, body)


def test_two_wrapped_modules_at_once_do_not_mix() -> None:
    """A generator and a discriminator: both have buckets in flight, which ranks start in different orders."""

    def body(group):
        one = DistributedDataParallel(network(1), group, bucket_cap_mb=SMALL_MB)
        two = DistributedDataParallel(network(1), group, bucket_cap_mb=SMALL_MB)
        for _ in range(3):
            one.zero_grad()
            two.zero_grad()
            outputs = [one(batch(group.rank)), 10 * two(batch(group.rank))]
            (outputs[group.rank].sum() + outputs[1 - group.rank].sum()).backward()
        return gradients(one), gradients(two)

    results = run_world(2, body)
    check_same([one for one, _ in results])
    check_same([two for _, two in results])
    for name, gradient in results[0][0].items():
        torch.testing.assert_close(10 * gradient, results[0][1][name])


def test_parameters_that_change_after_wrapping_are_named_at_the_next_forward_pass() -> None:
    def body(group):
        module = network()
        module[0].bias.requires_grad = False
        ddp, kept = DistributedDataParallel(module, group), module[0].weight

        def refused(text: str) -> None:
            for _ in range(2):
                with pytest.raises(UsageError, match=text):
                    ddp(batch(0))

        ddp(batch(0)).sum().backward()
        module[0].late = nn.Parameter(torch.zeros(2))
        refused(r"'0\.late' was added")
        del module[0].late
        ddp(batch(0)).sum().backward()
        module[0].weight = nn.Parameter(kept.detach().clone())
        refused(r"'0\.weight' was replaced")
        module[0]._parameters["weight"] = kept
        ddp(batch(0)).sum().backward()
        module[0].bias.requires_grad = True
        refused(r"'0\.bias' was frozen")
        module[0].bias.requires_grad = False
        module.append(nn.Linear(3, 3))
        refused(r"'\d\.weight' was added")
        del module[len(module) - 1]
        del module[0].weight
        with torch.no_grad(), pytest.raises(AttributeError):
            ddp(batch(0))
        with pytest.raises(UsageError, match=r"'0\.weight' was taken away"):
            ddp(batch(0))

    run_world(1, body)
