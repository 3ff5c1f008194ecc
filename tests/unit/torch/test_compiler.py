"""torch.compile of modules, wrappers and whole training steps."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest

from ferrorpc.testing import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from ferrorpc.torch import DistributedDataParallel, ZeroOptimizer  # noqa: E402
from tests.unit.torch.models import SMALL_MB, batch, check_close, check_same, gradients, network, reference  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # from torch's tracer
    pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning"),  # from torch, on Python 3.13.0
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch, by its optimizers when they are compiled
]


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch.compiler.reset()


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapper_around_a_compiled_module_and_a_compiled_wrapper_compile_the_module_alone(inside: bool) -> None:
    def body(group):
        graphs = []

        def backend(graph, inputs):
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
            return graph

        module = network()
        inner = torch.compile(module, backend=backend) if inside else module
        ddp = DistributedDataParallel(inner, group, bucket_cap_mb=SMALL_MB)
        called = ddp if inside else torch.compile(ddp, backend=backend)
        for step in range(2):
            module.zero_grad()
            called(batch(group.rank, step)).square().sum().backward()
        assert len(graphs) == 1
        assert len(graphs[0]) == len(module), "every layer, and nothing else"
        return gradients(module)

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, lambda m, rank: m(batch(rank, 1)).square().sum().backward()))


def test_finalizers_that_a_compiled_step_makes_are_not_traced() -> None:
    """Their registry is the process's, and changes meanwhile."""
    trace_rules = pytest.importorskip("torch._dynamo.trace_rules")
    run_world(2, lambda group: DistributedDataParallel(network(), group).module)
    assert trace_rules.check(weakref.finalize.__init__)


def _trained(group, compiled: bool, how: str, zero: bool):
    """Weights after three steps, each a function that goes from the batch to the new weights, and how many graphs it took."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    ddp = DistributedDataParallel(network(), group, bucket_cap_mb=SMALL_MB)
    kind, lr = torch.optim.SGD, 0.5
    optimizer = ZeroOptimizer(ddp.parameters(), kind, group, lr=lr) if zero else kind(ddp.parameters(), lr=lr)

    def step(x):
        optimizer.zero_grad()
        if how == "accumulated":
            with ddp.no_sync():
                ddp(x * 2).square().mean().backward()
        with ddp.weighted(1 + group.rank) if how == "weighted" else nullcontext():
            loss = ddp(x).square().mean()
            loss.backward()
        optimizer.step()
        return group.all_reduce(loss.detach() * 2) + 1

    called = torch.compile(step, backend=backend) if compiled else step
    losses = [called(batch(group.rank, number)) for number in range(3)]
    return {**ddp.state_dict(), "losses": torch.stack(losses)}, len(graphs)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("how", ["plain", "weighted", "accumulated"])
def test_a_whole_training_step_may_be_compiled(how: str, zero: bool) -> None:
    expected, _ = run_world(2, lambda group: _trained(group, False, how, zero))[0]
    found = run_world(2, lambda group: _trained(group, True, how, zero))
    for state, graphs in found:
        assert graphs, "the module is compiled"
        check_close(state, expected)
