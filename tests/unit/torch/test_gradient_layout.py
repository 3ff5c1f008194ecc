"""The memory and layout of gradients, and hooks that change them, as optimizers and users rely on."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from ferrorpc.errors import GroupAbortedError, TensorMismatchError, UsageError
from ferrorpc.hooks import ErrorFeedback, Hook
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import ferrorpc  # noqa: E402
from ferrorpc.torch import DistributedDataParallel  # noqa: E402
from tests.unit.torch.models import SMALL_MB, batch, check_close, check_same, gradients, network, reference  # noqa: E402


class Transposed(nn.Module):
    """A weight whose elements lie in the order of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(4, 6).t() / 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def convolution() -> nn.Module:
    module = nn.Conv2d(3, 2, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return module.to(memory_format=torch.channels_last)


def picture(rank: int) -> torch.Tensor:
    return torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("make", "data"), [(convolution, picture), (Transposed, batch)])
@pytest.mark.parametrize("views", [True, False])
def test_fused_optimizers_which_do_not_look_at_strides_update_the_right_weights(make, data, optimizer, views: bool) -> None:
    def trained(module: nn.Module, gradients, fused: bool) -> nn.Module:
        steps = optimizer(module.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            steps.zero_grad()
            gradients(module)
            steps.step()
        return module

    def body(group):
        module = make()
        ddp = DistributedDataParallel(module, group, gradient_as_bucket_view=views)
        trained(module, lambda _: ddp(data(group.rank)).square().sum().backward(), fused=True)
        return dict(module.state_dict())

    def alone(module: nn.Module) -> None:
        sum(module(data(rank)).square().sum() / 2 for rank in range(2)).backward()

    results = run_world(2, body)
    check_same(results)
    for name, expected in trained(make(), alone, fused=False).state_dict().items():
        torch.testing.assert_close(results[0][name], expected)


@pytest.mark.parametrize("wrap", [ferrorpc.DistributedDataParallel, DistributedDataParallel])
def test_a_gradient_that_comes_from_other_ranks_alone_lies_as_its_weight(wrap) -> None:
    def body(group):
        module = convolution()
        ddp = wrap(module, group)
        if group.rank == 0:
            ddp(picture(0)).sum().backward()
        else:
            (ddp(picture(0)).sum() * 0 + module.bias.sum()).backward(inputs=[module.bias])
        if wrap is ferrorpc.DistributedDataParallel:
            ddp.sync_gradients()
        assert module.weight.grad.stride() == module.weight.stride()
        return module.weight.grad.clone()

    first, second = run_world(2, body)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


def test_gradients_are_averaged_though_the_user_set_the_data_of_those_before() -> None:
    """`p.grad.data = ...` gives our tensor other memory than the bucket's."""

    def body(group):
        module = nn.Linear(2, 1, bias=False)
        ddp, found = DistributedDataParallel(module, group), []
        for step in range(4):
            ddp.zero_grad(set_to_none=step < 2)
            ddp(torch.full((1, 2), 10.0 * step + group.rank)).sum().backward()
            found.append(module.weight.grad[0, 0].item())
            module.weight.grad.data = module.weight.grad.data / 2
        return found

    assert run_world(2, body) == [[0.5, 10.5, 20.5, 30.5]] * 2


@pytest.mark.parametrize("exchange", ["objects", "data"])
@pytest.mark.parametrize("weight", [None, 3.0])
@pytest.mark.parametrize("views", [True, False])
def test_gradients_that_two_parameters_have_exchanged_are_added_to(views: bool, weight: float | None, exchange: str) -> None:
    """They lie in each other's slots, which the backward pass writes to in its order."""

    def body(group):
        module = nn.Module()
        module.a, module.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        module.forward = lambda a, b: (module.a * a + module.b * b).sum()
        ddp = DistributedDataParallel(module, group, gradient_as_bucket_view=views)
        a, b = module.a, module.b
        for factors in ((1.0, 2.0), (10.0, 20.0), (100.0, 200.0)):
            with nullcontext() if weight is None else ddp.weighted(weight):
                ddp(*factors).backward()
            if exchange == "objects":
                a.grad, b.grad = b.grad, a.grad
            else:
                a.grad.data, b.grad.data = b.grad.data, a.grad.data
        return a.grad.tolist(), b.grad.tolist()

    assert run_world(2, body) == [([212.0] * 2, [121.0] * 2)] * 2


def test_a_module_that_changes_its_dtype_after_wrapping_is_an_error_that_says_so() -> None:
    def body(group):
        module = network()
        ddp = DistributedDataParallel(module, group)
        ddp(batch(group.rank)).sum().backward()
        ddp.double()
        with pytest.raises(TensorMismatchError, match=r"the gradient of .* is float64.*\n.*before it is wrapped") as caught:
            ddp(batch(group.rank).double()).sum().backward()
        return str(caught.value)

    assert len(set(run_world(2, body))) == 1


@pytest.mark.parametrize("views", [True, False])
def test_a_gradient_that_the_user_made_for_a_weight_nobody_uses_stays_as_it_was(views: bool) -> None:
    def body(group):
        module = nn.Linear(2, 1)
        ddp = DistributedDataParallel(module, group, gradient_as_bucket_view=views)
        module.bias.grad = torch.full((1,), float(group.rank))
        ddp.module.weight.sum().backward()
        return module.bias.grad.item()

    assert run_world(2, body) == [0.0, 1.0]


@pytest.mark.parametrize("change", [torch.Tensor.t, lambda grad: grad.detach().mul_(2)])
def test_a_gradient_that_the_user_changed_in_its_place_stays_so_while_nobody_uses_its_weight(change) -> None:
    def body(group):
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        ddp = DistributedDataParallel(module, group)
        ddp(torch.arange(4.0).reshape(2, 2) + group.rank).pow(2).sum().backward()
        weight = module[0].weight
        weight.grad = change(weight.grad)
        before = weight.grad.clone()
        module[1](torch.ones(2, 2)).sum().backward()
        return torch.equal(weight.grad, before)

    assert run_world(2, body) == [True, True]


def test_a_sparse_gradient_names_its_parameter() -> None:
    def body(group):
        ddp = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), group)
        ddp(torch.tensor([group.rank])).sum().backward()

    texts = [str(error) for error in run_world(2, body, return_exceptions=True)]
    assert all("the gradient of 'weight': the tensor's layout is torch.sparse_coo" in text for text in texts)
    assert any("sparse=False" in text for text in texts), "on the rank that was the first"


def test_a_gradient_that_only_one_rank_cannot_send_is_what_the_others_hear_of() -> None:
    """Also in the first step, whose gradients are all sent at its end, and if the error is caught."""

    def body(group):
        ddp = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), group)
        if group.rank == 1:
            with pytest.raises(UsageError, match="sparse"):
                ddp(torch.tensor([0])).sum().backward()
        with pytest.raises(GroupAbortedError) as caught:
            ddp.module.weight.sum().backward()
        return caught.value.rank, "sparse" in caught.value.cause

    assert run_world(2, body) == [(1, True)] * 2


def test_a_lazy_parameter_is_refused_before_anything_listens_to_the_others() -> None:
    def body(group):
        module = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(2))
        with pytest.raises(UsageError, match=r"'1\.weight' is lazy.*\n.*then wrap it"):
            DistributedDataParallel(module, group)
        module(batch(0))
        ddp = DistributedDataParallel(module, group)
        ddp(batch(group.rank)).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}

    check_same(run_world(2, body))


def test_a_buffer_that_grows_says_what_to_do() -> None:
    class Growing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, torch.zeros(1)])
            return super().forward(x)

    def body(group):
        module = Growing(6, 2)
        module.register_buffer("seen", torch.zeros(1))
        ddp = DistributedDataParallel(module, group)
        with pytest.raises(TensorMismatchError, match=r"buffer 'seen' is float32\[2\].*\n.*buffers=\"local\""):
            ddp(batch(0)).sum().backward()

    run_world(2, body)


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (torch.zeros(3).to(torch.float8_e4m3fn), "buffer 'mask': dtype float8_e4m3fn is not supported"),
        (torch.zeros(4).expand(3, 4), "buffer 'mask': out has elements that share memory"),
    ],
    ids=["float8", "expanded"],
)
def test_a_buffer_that_cannot_be_sent_is_named(buffer, text: str) -> None:
    def body(group):
        module = network()
        module.register_buffer("mask", buffer)
        with pytest.raises(TensorMismatchError, match=text):
            DistributedDataParallel(module, group)

    run_world(2, body)


def test_means_of_a_synchroniser_lie_as_the_weights_they_are_for() -> None:
    """They become `.grad`, where optimizers rely on it."""

    def body(group):
        weight = convolution().weight.detach()
        sync = ferrorpc.GradientSynchronizer({"weight": weight, "bias": torch.zeros(2)}, group)
        mean = sync({"weight": weight * group.rank, "bias": None})["weight"]
        assert mean.stride() == weight.stride() != mean.contiguous().stride()
        return torch.equal(mean, weight / 2)

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_what_a_users_hook_does_to_a_gradient_is_done_before_it_is_averaged(before: bool, views: bool) -> None:
    """As in torch, whether the hook was there first or not."""

    def clamped(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-0.05, 0.05)

    def body(group):
        module, found = network(), []
        if not before:
            ddp = DistributedDataParallel(module, group, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=views)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(clamped)
        if before:
            ddp = DistributedDataParallel(module, group, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=views)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(group.rank, step)).square().sum().backward()
            found.append(gradients(ddp))
        return found

    def local(module: nn.Module, rank: int, step: int) -> None:
        module(batch(rank, step)).square().sum().backward()
        for parameter in module.parameters():
            clamped(parameter)

    results = run_world(2, body)
    for step in range(3):
        steps = [found[step] for found in results]
        check_same(steps)
        check_close(steps[0], reference(2, lambda m, rank, s=step: local(m, rank, s)))


def test_a_parameter_with_a_users_hook_may_be_frozen_for_some_steps() -> None:
    def clamped(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(max=1.0)

    def body(group):
        module, found = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)), []
        ddp = DistributedDataParallel(module, group)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(clamped)
            parameter.data.fill_(1.0)
        for trains in (False, True):
            module[0].requires_grad_(trains)
            ddp.zero_grad()
            ddp(torch.full((1, 2), 3.0 * group.rank)).sum().backward()
            found.append([None if each.grad is None else each.grad.unique().tolist() for each in module.parameters()])
        return found

    assert run_world(2, body) == [[[None, [0.5]], [[0.5], [0.5]]]] * 2


def test_an_optimizer_that_steps_in_a_hook_is_told_that_gradients_are_no_means_yet() -> None:
    """And so are the other ranks, which wait for this one's gradients."""

    def body(group):
        ddp = DistributedDataParallel(network(), group)

        def stepped(parameter: nn.Parameter) -> None:
            torch.optim.SGD([parameter], lr=0.1).step()
            parameter.grad = None

        def train() -> None:
            group.barrier()
            ddp(batch(group.rank)).square().sum().backward()

        for parameter in ddp.parameters() if group.rank == 1 else ():
            parameter.register_post_accumulate_grad_hook(stepped)
        error, hint = (UsageError, r"backward\(\) has returned") if group.rank == 1 else (GroupAbortedError, "")
        with pytest.raises(error, match=rf"'4\.bias' was taken away(.|\n)*{hint}"):
            train()

    run_world(2, body)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("own", [True, False], ids=["an optimizer per parameter", "one optimizer"])
def test_an_optimizer_that_steps_in_a_hook_and_leaves_the_gradient_is_told_too(own: bool, steps: int) -> None:
    """It would step by this rank's gradient, and weights would differ between ranks from then on."""

    def body(group):
        ddp = DistributedDataParallel(network(), group)
        for _ in range(steps - 1):
            ddp(batch(group.rank)).square().sum().backward()
            ddp.zero_grad()
        for parameter in ddp.parameters() if group.rank == 1 else ():
            stepped = torch.optim.Adam([parameter] if own else ddp.parameters())
            parameter.register_post_accumulate_grad_hook(lambda _, stepped=stepped: stepped.step())
        with ddp.no_sync():
            ddp(batch(group.rank)).square().sum().backward()  # what a rank does alone is its own affair
        error, hint = (UsageError, r"backward\(\) has returned") if group.rank == 1 else (GroupAbortedError, "")
        with pytest.raises(error, match=rf"'4\.bias' was changed(.|\n)*{hint}"):
            ddp(batch(group.rank)).square().sum().backward()

    run_world(2, body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_parameters_that_a_checkpoint_changes_again_are_averaged(reentrant: bool) -> None:
    """As layers do that keep their weights within bounds."""

    class Bounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Bounded(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    def body(group):
        ddp = DistributedDataParallel(Checkpointed(), group)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 6), float(group.rank))).sum().backward()
        return ddp.module.inner.weight.grad.unique().tolist()

    assert run_world(2, body) == [[0.5]] * 2


def test_a_hook_gets_a_gradient_from_before_among_what_is_unused_and_error_feedback_keeps_nothing_of_it() -> None:
    class Halving(Hook):
        """Delivers half of what it is given. Records the values of parameters that are unused here."""

        text, remembers = "halving", False

        def __init__(self) -> None:
            self.unused: list[float] = []

        def exchange(self, part, collectives):
            self.unused += [float(part.values[start:stop].sum()) for start, stop in part.unused]
            delivered = part.values / 2
            part.values[...] = delivered
            yield collectives.all_reduce(part.values)
            return delivered

    class Used(nn.Module):
        """The sum of the parameters with the indices that it is given."""

        def __init__(self, parameters: nn.ParameterList) -> None:
            super().__init__()
            self.held = parameters

        def forward(self, indices):
            return sum(self.held[index].sum() for index in indices)

    def body(group):
        module = nn.ParameterList([torch.zeros(3), torch.zeros(3)])
        inner = Halving()
        hook = ErrorFeedback(inner)
        ddp = DistributedDataParallel(Used(module), group, hook=hook)
        module[1].grad = torch.full((3,), 4.0)
        ddp([0, 1] if group.rank else [0]).backward()
        ((_, residues),) = hook.state().items()
        return inner.unused, module[1].grad.tolist(), float(residues.sum())

    (unused, mean, kept), (used, other, more) = run_world(2, body)
    assert (unused, used) == ([12.0], [])
    assert mean == other == [(4 + 5) / 2 / 2] * 3
    assert (kept, more) == (0.5 * 3, 0.5 * 3 + 2.5 * 3)
