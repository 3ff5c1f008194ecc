"""torch modules whose gradients are averaged during the backward pass, compared with one process."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

from ferrorpc.errors import CollectiveMismatchError, GroupAbortedError, UsageError
from ferrorpc.testing import FaultPlan, run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from ferrorpc.torch import DistributedDataParallel  # noqa: E402
from tests.unit.torch.models import SMALL_MB, batch, check_close, check_same, gradients, network, reference  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("views", [True, False])
def test_gradients_are_those_of_one_process_step_after_step(size: int, views: bool) -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=views)
        found = []
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(group.rank, step)).square().sum().backward()
            found.append(gradients(ddp))
        return found

    results = run_world(size, body, faults=FaultPlan(delay_seconds=(0.0, 0.01)))
    for step in range(3):
        steps = [found[step] for found in results]
        check_same(steps)
        check_close(steps[0], reference(size, lambda m, rank, s=step: m(batch(rank, s)).square().sum().backward()))


def test_an_optimizer_keeps_identical_weights_on_all_ranks() -> None:
    def body(group):
        module = network(seed=group.rank)
        ddp = DistributedDataParallel(module, group, bucket_cap_mb=SMALL_MB)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        losses = []
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = ddp(batch(group.rank)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    check_same(run_world(3, body))


@pytest.mark.parametrize("way", ["broadcast_parameters", "uneven"])
def test_a_graph_from_before_weights_were_made_equal_is_refused(way: str) -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        loss = ddp(batch(group.rank)).square().sum()
        if way == "uneven":
            with ddp.uneven():
                pass
        else:
            ddp.broadcast_parameters()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_world(2, body)


def test_several_forward_passes_may_share_one_backward_pass() -> None:
    def local(module, rank):
        (module(batch(rank)).square().sum() + module(batch(rank, 1)).sum()).backward()

    def body(group):
        ddp = DistributedDataParallel(network(), group, bucket_cap_mb=SMALL_MB)
        for _ in range(2):
            ddp.zero_grad()
            local(ddp, group.rank)
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, local))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_weighted_by_tokens(dtype: torch.dtype) -> None:
    weights = [3.0, 1.0]

    def local(module, rank):
        module(batch(rank).to(dtype)).square().mean().backward()

    def body(group):
        ddp = DistributedDataParallel(network().to(dtype), group, bucket_cap_mb=SMALL_MB)
        for _ in range(2):
            ddp.zero_grad()
            with ddp.weighted(weights[group.rank]):
                with ddp.weighted(1.0):
                    pass
                local(ddp, group.rank)
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    modules = [network().to(dtype) for _ in range(2)]
    for rank, module in enumerate(modules):
        local(module, rank)
    for name, found in results[0].items():
        one, two = (dict(m.named_parameters())[name].grad.float() * weights[rank] for rank, m in enumerate(modules))
        wanted = ((one + two) / 4).to(dtype)
        assert torch.equal(found, wanted), name


class Versioned(nn.Linear):
    """Notes the version of the state that it loads."""

    _version = 3
    loaded: int | None = None

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("make", [lambda: Versioned(2, 2), lambda: nn.Sequential(Versioned(2, 2))])
def test_modules_learn_which_version_wrote_a_checkpoint_of_torchs_own_wrapper(make) -> None:
    def body(group):
        ddp = DistributedDataParallel(make(), group)
        theirs = nn.ModuleDict({"module": make()}).state_dict()
        ddp.load_state_dict(theirs)
        return [part.loaded for part in ddp.modules() if isinstance(part, Versioned)]

    assert run_world(1, body) == [[3]]


@pytest.mark.parametrize("make", [lambda: Versioned(2, 2), lambda: nn.Sequential(Versioned(2, 2))])
def test_modules_in_a_wrapper_that_is_a_part_of_another_module_learn_which_version_wrote_their_state(make) -> None:
    def body(group):
        outer = nn.ModuleDict({"part": DistributedDataParallel(make(), group), "partner": Versioned(1, 1)})
        outer.load_state_dict(outer.state_dict())
        return [part.loaded for part in outer.modules() if isinstance(part, Versioned)]

    assert run_world(1, body) == [[3, 3]]


def test_a_weight_that_would_be_set_on_the_wrapper_is_refused() -> None:
    """As torch.func.functional_call does with names that are the module's own: the module would use its old ones."""

    def body(group):
        module = nn.Linear(6, 2)
        ddp = DistributedDataParallel(module, group)
        zeros = {name: torch.zeros_like(each) for name, each in ddp.named_parameters()}
        with pytest.raises(UsageError, match=r"'weight' is a part of the module(.|\n)*ddp\.module"):
            torch.func.functional_call(ddp, zeros, (batch(0),))
        assert not torch.func.functional_call(ddp.module, zeros, (batch(0),)).any()
        ddp.cache = torch.zeros(1)
        assert ddp(batch(0)).equal(module(batch(0)))

    run_world(1, body)


def test_names_in_a_checkpoint_do_not_tell_that_the_module_was_wrapped() -> None:
    def body(group):
        plain = network(seed=3)
        ddp = DistributedDataParallel(network(seed=4), group)
        assert list(ddp.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in ddp.named_parameters()] == [name for name, _ in plain.named_parameters()]
        ddp.load_state_dict(plain.state_dict())
        check_same([plain.state_dict(), ddp.state_dict()])
        theirs = {f"module.{name}": tensor + 1 for name, tensor in plain.state_dict().items()}
        ddp.load_state_dict(theirs)
        assert torch.equal(ddp.state_dict()["0.weight"], plain.state_dict()["0.weight"] + 1)
        outer = nn.ModuleDict({"part": ddp})
        assert list(outer.state_dict()) == [f"part.{name}" for name in plain.state_dict()]
        outer.load_state_dict({f"part.{name}": tensor for name, tensor in plain.state_dict().items()})
        check_same([plain.state_dict(), ddp.state_dict()])
        with pytest.raises(RuntimeError, match="nonsense"):
            outer.load_state_dict({"part.nonsense": torch.zeros(1)})

    run_world(1, body)


class Counting(nn.Module):
    """Buffers of three dtypes that differ by rank after a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = network(1, (6, 2))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.shape[0]
        return self.norm(self.layer(x))


@pytest.mark.parametrize("mode", ["broadcast", "mean", "local"])
def test_buffers_are_rank_zeros_or_the_mean_or_each_ranks_own(mode: str) -> None:
    def body(group):
        ddp = DistributedDataParallel(Counting(), group, buffers=mode)
        for step in range(2):
            ddp(batch(group.rank, step, rows=2 + 2 * group.rank)).square().sum().backward()
        return {name: buffer.clone() for name, buffer in ddp.named_buffers()}

    first, second = run_world(2, body)
    if mode == "local":
        assert (first["seen"].item(), second["seen"].item()) == (4, 8)
        assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
        return
    check_same([first, second])
    assert first["seen"].item() == (4 if mode == "broadcast" else 6)
    assert first["norm.num_batches_tracked"].item() == 2


def test_a_backward_pass_that_does_not_go_through_an_output_is_averaged_too() -> None:
    def body(group):
        module = network()
        ddp = DistributedDataParallel(module, group, bucket_cap_mb=SMALL_MB)
        for _ in range(2):
            ddp.zero_grad()
            (module[0].weight.sum() * (group.rank + 1)).backward()
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    assert torch.equal(results[0]["0.weight"], torch.full((16, 6), 1.5))
    assert all(gradient is None for name, gradient in results[0].items() if name != "0.weight")


def test_outputs_in_containers_and_outputs_without_gradients() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = network(1, (6, 2))

        def forward(self, x):
            y = self.layer(x)
            return {"logits": y, "aux": [y.detach(), (y * 2, None, 3)]}

    def body(group):
        ddp = DistributedDataParallel(Many(), group)
        with torch.no_grad():
            assert not ddp(batch(0))["logits"].requires_grad
        ddp(batch(group.rank))["aux"][1][0].sum().backward()
        return gradients(ddp)

    results = run_world(2, body)
    check_same(results)
    wanted = reference(2, lambda m, rank: (2 * m(batch(rank))).sum().backward(), lambda: network(1, (6, 2)))
    check_close({name.removeprefix("layer."): g for name, g in results[0].items()}, wanted)


def test_what_a_loop_sets_within_no_sync_is_over_with_it_as_in_torch():
    def body(group):
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), group)

        def mean():
            ddp.zero_grad(set_to_none=True)
            ddp(torch.full((1, 1), group.rank + 1.0)).sum().backward()
            return ddp.module.weight.grad.item()

        with ddp.no_sync():
            before, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, False
            alone = mean()
            ddp.require_backward_grad_sync = before
            ddp.require_backward_grad_sync = True
            together = mean()
        return alone, together, mean()

    assert run_world(2, body) == [(1.0, 1.5, 1.5), (2.0, 1.5, 1.5)]


def test_a_loop_may_set_the_attribute_in_place_of_no_sync() -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        for part in range(3):
            ddp.require_backward_grad_sync = part == 2
            before = ddp.sent_bytes
            ddp(batch(group.rank, part)).square().sum().backward()
            assert (ddp.sent_bytes > before) == ddp.require_backward_grad_sync
        return gradients(ddp)

    def local(module, rank):
        sum(module(batch(rank, part)).square().sum() for part in range(3)).backward()

    results = run_world(2, body)
    check_same(results)
    check_close(results[0], reference(2, local))


def test_gradients_lie_in_the_buckets_and_nowhere_else() -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        for _ in range(2):
            ddp.zero_grad()
            ddp(batch(group.rank)).square().sum().backward()
        (memory,) = ddp._replica.reducer.memory
        first, last = memory.array.ctypes.data, memory.array.ctypes.data + memory.array.nbytes
        assert all(first <= parameter.grad.data_ptr() < last for parameter in ddp.parameters())

    run_world(2, body)


def test_ranks_that_wrap_different_modules_learn_where_they_differ() -> None:
    def body(group):
        with pytest.raises(CollectiveMismatchError, match=r"4\.weight: float32\[3,12\]"):
            DistributedDataParallel(network(widths=(6, 16, 12, 3 + group.rank)), group)

    run_world(2, body)


def test_a_wrapper_that_is_gone_leaves_the_module_alone_and_it_may_be_wrapped_again() -> None:
    def body(group):
        module = network()
        ddp = DistributedDataParallel(module, group)
        ddp(batch(group.rank)).square().sum().backward()
        del ddp
        gc.collect()
        module.zero_grad()
        module(batch(group.rank)).square().sum().backward()
        alone = gradients(module)
        module.zero_grad()
        again = DistributedDataParallel(module, group)
        again(batch(group.rank)).square().sum().backward()
        return alone, gradients(again)

    results = run_world(2, body)
    assert not torch.equal(results[0][0]["0.weight"], results[1][0]["0.weight"])
    check_same([averaged for _, averaged in results])


def test_the_newest_wrapper_of_a_module_averages_alone() -> None:
    """A wrapper of the previous generation that is still referenced does nothing more, in whatever state it was."""

    def fails(gradient):
        raise ValueError("on this rank only")

    def body(group):
        module = network()
        before = DistributedDataParallel(module, group, bucket_cap_mb=SMALL_MB)
        before(batch(group.rank)).square().sum().backward()
        handle = module[0].weight.register_hook(fails) if group.rank else None
        with pytest.raises((ValueError, GroupAbortedError)) as caught:
            before(batch(group.rank)).square().sum().backward()
        if handle is not None:
            group.abort(caught.value)
            handle.remove()
        after = DistributedDataParallel(module, group.reform(), bucket_cap_mb=SMALL_MB)
        found = []
        for step in range(2):
            with pytest.raises(UsageError, match=r"averages nothing any more.*\n.*newest wrapper"):
                before(batch(group.rank))
            after.zero_grad()
            after(batch(group.rank, step)).square().sum().backward()
            found.append(gradients(after))
        return found

    results = run_world(2, body)
    for step in range(2):
        check_same([found[step] for found in results])
        check_close(results[0][step], reference(2, lambda m, rank, s=step: m(batch(rank, s)).square().sum().backward()))


def test_a_parameter_that_two_modules_share_has_one_wrapper() -> None:
    """The second must not take the gradients of the first one's other parameters."""

    def body(group):
        shared = network(1, (6, 6))
        first, second = nn.Sequential(shared, network(2, (6, 2))), nn.Sequential(shared, network(3, (6, 2)))
        ddp = DistributedDataParallel(first, group)
        ddp.itself = [ddp]  # so that only the collector lets go of it
        with pytest.raises(UsageError, match=r"'0\.0\.weight' also belongs to another module.*\n.*both as parts"):
            DistributedDataParallel(second, group)
        ddp(batch(group.rank)).square().sum().backward()
        found = [gradients(first)]
        del ddp
        first.zero_grad()
        other = DistributedDataParallel(second, group)
        other(batch(group.rank)).square().sum().backward()
        found.append(gradients(second))
        DistributedDataParallel(nn.ModuleList([first, second]), group)
        with pytest.raises(UsageError, match="averages nothing any more"):
            other(batch(group.rank))
        return found

    def alone(seed: int):
        make = lambda: nn.Sequential(network(1, (6, 6)), network(seed, (6, 2)))  # noqa: E731
        return reference(2, lambda m, rank: m(batch(rank)).square().sum().backward(), make)

    for first, second in run_world(2, body):
        check_close(first, alone(2))
        check_close(second, alone(3))


def test_the_backward_pass_of_a_wrapper_that_was_let_go_of_does_not_pass_for_an_average() -> None:
    def body(group):
        loss = DistributedDataParallel(network(), group)(batch(group.rank)).sum()
        gc.collect()
        with pytest.raises(UsageError, match="let go of"):
            loss.backward()

    run_world(2, body)


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_wrapper_that_is_copied_says_what_to_copy(how) -> None:
    def body(group):
        with pytest.raises(UsageError, match=r"cannot be copied or pickled\ntry: copy or save ddp\.module"):
            how(DistributedDataParallel(network(), group))

    run_world(1, body)


def test_a_batch_norm_that_would_silently_not_be_synchronised_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))

    def body(group):
        if group.size == 1:
            return DistributedDataParallel(module, group).module
        with pytest.raises(UsageError, match="1 is a SyncBatchNorm"):
            DistributedDataParallel(module, group)
        return module

    assert run_world(1, body) == [module]
    assert run_world(2, body) == [module] * 2


@pytest.mark.filterwarnings("ignore:Using backward")  # of torch: such a graph and its gradients hold each other
@pytest.mark.parametrize("views", [True, False])
def test_create_graph_is_refused_with_what_to_do_instead(views: bool) -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group, gradient_as_bucket_view=views)
        with pytest.raises(UsageError, match=r"not differentiable(.|\n)*torch\.autograd\.grad"):
            ddp(batch(group.rank)).square().sum().backward(create_graph=True)

    run_world(1, body)
