"""Torch modules as stages: the gradients of one process, and split backward passes."""

from __future__ import annotations

from functools import cache

import pytest

from ferrorpc import schedules
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import FaultPlan, run_world

torch = pytest.importorskip("torch")
nn = torch.nn
stages_of_torch = pytest.importorskip("ferrorpc.torch")
from ferrorpc.torch import split_backward  # noqa: E402

Stage, with_gradient = stages_of_torch.Stage, stages_of_torch.with_gradient
WIDTH = 8
STEPS = 4
SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved", "zb1p", "zb1p 2", "zbv", "dualpipe_v")


class Block(nn.Module):
    """A layer with a residual connection, a norm, and two uses of one weight."""

    def __init__(self, number: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)
            self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return torch.tanh(x @ self.twice) @ self.twice


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """One thread per operator: the ranks are threads already, and their operators are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(rows: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


loss_of = nn.functional.mse_loss


@cache
def one_process(blocks: int, rows: int, microbatches: int, steps: int, device: str = "cpu") -> nn.Sequential:
    """One process: microbatches one after the other, each loss scaled by its share of the batch. Cached for schedules with
    equally many stages."""
    alone = nn.Sequential(*(Block(number) for number in range(blocks))).to(device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        x, target = (each.to(device).tensor_split(microbatches) for each in batch(rows, step))
        for part, wanted in zip(x, target, strict=True):
            (loss_of(alone(part), wanted) * (len(part) / rows)).backward()
        optimizer.step()
    return alone


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_are_those_of_one_process(name: str, stages: int):
    """Uneven microbatches, every schedule, with a torch optimizer."""
    key, _, chunks = name.partition(" ")
    schedule = schedules.named(key, stages, 8 if name == "dualpipe_v" else 7, int(chunks) if chunks else None)

    def body(group):
        blocks = {number: Block(number) for number in schedule.pieces(group.rank)}
        pipe = Pipeline([Stage(block) for block in blocks.values()], group, schedule)
        optimizer = torch.optim.SGD([each for block in blocks.values() for each in block.parameters()], lr=0.02)
        for step in range(STEPS):
            optimizer.zero_grad()
            pipe.step(*batch(17, step), with_gradient(loss_of))
            optimizer.step()
        return blocks

    results = run_world(stages, body, faults=FaultPlan(delay_seconds=(0.0, 0.05)))
    pipelined = {number: block for blocks in results for number, block in blocks.items()}
    for microbatches, tolerance in ((schedule.microbatches, 1e-6), (1, 1e-4)):
        for number, block in enumerate(one_process(schedule.virtual_stages, 17, microbatches, STEPS)):
            for found, wanted in zip(pipelined[number].parameters(), block.parameters(), strict=True):
                assert (found - wanted).norm() <= tolerance * wanted.norm()
                assert (found.grad - wanted.grad).norm() <= tolerance * wanted.grad.norm()


def test_nobody_computes_the_gradient_of_what_comes_from_outside():
    """The first stage's input: neither in a whole backward pass, nor in the first half of a split one."""
    for name in ("gpipe", "zb1p"):

        def body(group, name=name):
            stage = Stage(Block(group.rank))
            inputs = []
            stage.module.norm.register_forward_hook(lambda _, given, __: inputs.append(given[0].requires_grad))
            Pipeline(stage, group, name, 2).step(*batch(4, 0), with_gradient(loss_of))
            return inputs

        assert run_world(2, body) == [[False, False], [True, True]]


class Custom(torch.autograd.Function):
    """x * weight, written by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, WIDTH + 1))

    def forward(self, x):
        return Custom.apply(torch.sin(x), self.weight)


class Derived(nn.Module):
    """A weight that is computed from others, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.root = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.tanh(x @ (self.scale * self.root.T @ self.root)) + self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x[None], x[None], x[None], need_weights=False)[0][0]


class Ignoring(nn.Module):
    """Its output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.weight.expand(len(x), WIDTH) * 2


class Hooked(nn.Module):
    """Its layer's output, and its own, have hooks that change the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.layer(x)
        hidden.register_hook(lambda grad: grad.clamp(-0.1, 0.1) + 1)
        y = self.last(torch.tanh(hidden))
        y.register_hook(lambda grad: 3 * grad)
        return y


def frozen() -> nn.Module:
    block = Block(1)
    block.up.weight.requires_grad_(False)
    return block


MODULES = {
    "block": lambda: Block(0),
    "deep": lambda: nn.Sequential(*(Block(number) for number in range(3))),
    "custom function": ByHand,
    "hooks of tensors": Hooked,
    "derived weights": Derived,
    "attention": Attention,
    "no way to the input": Ignoring,
    "frozen weights": frozen,
    "no weights": nn.Tanh,
    "identity": nn.Identity,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "reparametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_backward_in_two_is_the_whole_one(name: str):
    torch.manual_seed(0)
    module = MODULES[name]()
    x, grad = batch(5, 1)
    leaf = x.clone().requires_grad_()
    module(leaf).backward(grad)
    wanted = [each.grad for each in module.parameters()]
    for each in module.parameters():
        each.grad = None
    stage = Stage(module)
    _, context = stage.forward(x)
    found = stage.backward_input(context, grad)
    stage.backward_weight(context, grad)
    pairs = [(found, leaf.grad), *zip([each.grad for each in module.parameters()], wanted, strict=True)]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


class Beside(nn.Module):
    """Only its first output depends on its input; the second shares a weight with it, and the last is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        first, second = (2 * self.scale).split([1, 2])
        return self.layer(x), self.layer.weight.sum(0), first, second, self.shift


def test_weights_of_outputs_that_do_not_depend_on_the_input_get_their_gradients():
    torch.manual_seed(0)
    found = []
    stage = Stage(Beside())
    for is_split in (False, True):
        stage.module.zero_grad()
        y, context = stage.forward(batch(5, 1)[0])
        grads = tuple(torch.arange(1.0, each.numel() + 1).view_as(each) for each in y)
        if is_split:
            stage.backward_input(context, grads)
            stage.backward_weight(context, grads)
        else:
            stage.backward(context, grads)
        found.append([each.grad for each in stage.module.parameters()])
    for whole, split in zip(*found, strict=True):
        torch.testing.assert_close(split, whole)


def test_weights_wait_for_the_second_half():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    stage = Stage(module)
    _, context = stage.forward(batch(5, 0)[0])
    grad_x = stage.backward_input(context, torch.ones(5, WIDTH))
    assert grad_x.abs().sum() > 0
    assert all(each.grad is None for each in module.parameters())
    stage.backward_weight(context, torch.ones(5, WIDTH))
    assert all(each.grad is not None for each in module.parameters())


def test_no_half_does_the_work_of_the_other():
    """Counts matrix products: of the three in the backward pass of two layers, each half computes its own."""
    from torch.utils.flop_counter import FlopCounterMode

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    stage = Stage(module)
    once = 2 * 5 * WIDTH * WIDTH
    _, context = stage.forward(batch(5, 0)[0])
    with FlopCounterMode(display=False) as counter:
        stage.backward_input(context, torch.ones(5, WIDTH))
    assert counter.get_total_flops() == 2 * once
    with FlopCounterMode(display=False) as counter:
        stage.backward_weight(context, torch.ones(5, WIDTH))
    assert counter.get_total_flops() == 2 * once


def test_hooks_of_parameters_run_once_for_each_microbatch():
    hits = []
    module = nn.Linear(WIDTH, WIDTH)
    module.weight.register_post_accumulate_grad_hook(lambda _: hits.append(1))
    stage = Stage(module)
    for _ in range(3):
        _, context = stage.forward(batch(5, 0)[0])
        stage.backward_input(context, torch.ones(5, WIDTH))
        stage.backward_weight(context, torch.ones(5, WIDTH))
    assert len(hits) == 3


def test_a_module_that_cannot_be_split_is_run_whole():
    stage = Stage(nn.Linear(WIDTH, WIDTH), split=False)
    assert not hasattr(stage, "backward_input")


class TwoInTwoOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, index):
        return x * self.weight + index[:, None], index


def test_several_inputs_and_outputs_some_without_gradients():
    stage = Stage(TwoInTwoOut())
    x, _ = batch(4, 0)
    (y, index), context = stage.forward((x, torch.arange(4)))
    assert not y.requires_grad
    assert index.tolist() == [0, 1, 2, 3]
    grads = stage.backward_input(context, (torch.ones_like(y), None))
    stage.backward_weight(context, (torch.ones_like(y), None))
    assert torch.equal(grads[0], torch.ones_like(x))
    assert grads[1] is None
    assert torch.allclose(stage.module.weight.grad, x.sum(0))


class Scores(nn.Module):
    """What models give as (logits, auxiliary output or None)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight, None


def test_the_last_stage_may_return_nones_among_its_tensors():
    x, target = batch(6, 0)

    def body(group):
        stage = Stage(Scores())
        pipe = Pipeline(stage, group, "gpipe", 2)
        pipe.step(x, target, with_gradient(lambda y, target: loss_of(y[0], target)))
        stepped, stage.module.weight.grad = stage.module.weight.grad, None
        y, nothing = outputs = pipe.forward(x)
        pipe.backward(outputs, (2 * (y - target) / y.numel(), None))
        return nothing, stepped, stage.module.weight.grad

    ((nothing, stepped, apart),) = run_world(1, body)
    assert nothing is None
    module = Scores()
    loss_of(module(x)[0], target).backward()
    torch.testing.assert_close(stepped, module.weight.grad)
    torch.testing.assert_close(apart, module.weight.grad)


def test_outputs_may_require_the_gradients_that_come_back():
    def body(group):
        stage, (x, target) = Stage(Block(group.rank)), batch(4, 0)
        pipe = Pipeline(stage, group, "gpipe", 2)
        outputs, grads = pipe.forward(x), None
        if outputs is not None:
            loss_of(outputs.requires_grad_(), target).backward()
            grads = outputs.grad
        pipe.backward(outputs, grads)
        return [each.grad.clone() for each in stage.module.parameters()]

    results = run_world(2, body)
    alone, (x, target) = nn.Sequential(Block(0), Block(1)), batch(4, 0)
    loss_of(alone(x), target).backward()
    for found, parameter in zip([*results[0], *results[1]], alone.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_tokens_go_in_where_an_embedding_is_first():
    """The first stage's input has no gradient; an embedding is tied to the last stage's layer."""
    vocabulary = 11

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(vocabulary, WIDTH))

        def forward(self, x):
            return x @ self.weight.T

    def embedding():
        torch.manual_seed(5)
        return nn.Embedding(vocabulary, WIDTH)

    tokens, target = torch.arange(9) % vocabulary, (torch.arange(9) + 1) % vocabulary
    loss = nn.functional.cross_entropy

    def body(group):
        module = [embedding(), Block(1), Head()][group.rank] if group.size == 3 else None
        pipe = Pipeline(Stage(module), group, "zb1p", 4, tied=[("0/weight", "2/weight")])
        return pipe.step(tokens, target, with_gradient(loss)), module

    torch.manual_seed(5)
    results = run_world(3, body)
    table, block = embedding(), Block(1)
    expected = loss(block(table(tokens)) @ table.weight.T, target)
    expected.backward()
    assert results[2][0].item() == pytest.approx(expected.item(), rel=1e-6)
    for module in (results[0][1], results[2][1]):
        assert (module.weight.grad - table.weight.grad).norm() <= 1e-6 * table.weight.grad.norm()


def test_complex_inputs_get_gradients():
    stage = Stage(nn.Linear(3, 1, dtype=torch.complex64))
    y, context = stage.forward(torch.ones(2, 3, dtype=torch.complex64) * 1j)
    assert torch.equal(stage.backward(context, torch.ones_like(y)), stage.module.weight.detach().conj().expand(2, 3))


def test_a_loss_keeps_no_graph_and_needs_nobody_who_asks_for_gradients():
    with torch.no_grad():
        loss, grad = with_gradient(loss_of)(torch.ones(2), torch.zeros(2))
    assert (loss, loss.requires_grad, grad.tolist()) == (1.0, False, [1.0, 1.0])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_what_a_backward_pass_in_two_does_first_of_all_may_be_done_in_any_mode(mode):
    with mode():
        split_backward._continue_from_an_edge.__wrapped__()
