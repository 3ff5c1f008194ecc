"""A program of a user with NumPy arrays, as mypy --strict and pyright see it (`assert_type` is what they are asked).

tests/house/test_types.py has mypy check it; nothing runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import ferrorpc
from ferrorpc.ddp.batch_norm import Normalised

F32 = NDArray[np.float32]


def collectives(group: ferrorpc.ProcessGroup, x: F32, loss: float, flag: bool) -> None:
    """Arrays come back in the type they went in as."""
    assert_type(group.all_reduce(x), F32)
    assert_type(group.all_reduce(x, "mean", out=x), F32)
    assert_type(group.all_reduce(x, ferrorpc.ReduceOp.MAX, wire="bf16", algorithm="ring", timeout=3.0), F32)
    assert_type(group.all_reduce(loss), NDArray[Any])
    assert_type(group.all_reduce(np.float64(loss)), NDArray[np.float64])
    assert_type(group.reduce(x, root=1), F32 | None)
    assert_type(group.reduce_scatter([x, x]), F32)
    assert_type(group.reduce_scatter(x), F32)
    assert_type(group.all_gather(x), list[F32])
    assert_type(group.all_gather(x, out=[x, x]), list[F32])
    assert_type(group.all_gather(x, out=x), F32)
    assert_type(group.all_gather(loss), list[NDArray[Any]])
    assert_type(group.gather(x), list[F32] | None)
    assert_type(group.all_to_all([x, x]), list[F32])
    assert_type(group.all_to_all([1, 2]), list[NDArray[Any]])
    assert_type(group.all_to_all((x, x)), list[F32])
    assert_type(group.broadcast(x), F32)
    assert_type(group.broadcast(out=x), F32)
    assert_type(group.broadcast(), NDArray[Any])
    assert_type(group.scatter([x, x]), F32)
    assert_type(group.scatter(root=1), NDArray[Any])
    assert_type(group.barrier(), None)
    both: F32 = group.broadcast(x if group.rank == 0 else None)
    mine: F32 = group.scatter([x, x] if group.rank == 0 else None)
    total = group.reduce(both)
    if total is not None:
        assert_type(total, F32)
    lengths: list[int] = [int(length) for length in group.all_gather(len(mine))]
    assert sum(lengths)


async def later(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """A Work knows what it brings."""
    work = group.all_reduce(x, async_op=True)
    assert_type(work, ferrorpc.Work[F32])
    assert_type(work.wait(timeout=1.0), F32)
    assert_type(await work, F32)
    assert_type(await group.all_gather(x, async_op=True), list[F32])
    assert_type(group.barrier(async_op=True), ferrorpc.Work[None])
    whatever: list[ferrorpc.Work[object]] = [work, group.barrier(async_op=True)]
    whatever.append(work)
    assert_type(work.done(), bool)
    assert_type(work.exception(), BaseException | None)
    works = [group.broadcast(each, async_op=True) for each in (x, x)]
    assert_type([each.wait() for each in works], list[F32])


def messages(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """send and recv."""
    assert_type(group.send(x, dst=1), None)
    assert_type(group.send(x, 1, tag=3, async_op=True), ferrorpc.Work[None])
    assert_type(group.recv(1), NDArray[Any])
    assert_type(group.recv(1, out=x), F32)
    assert_type(group.recv(1, 0, x), F32)
    assert_type(group.recv(src=1, tag=2, out=x, async_op=True), ferrorpc.Work[F32])
    assert_type(group.recv(1, timeout=2.0, async_op=True).wait(), NDArray[Any])


def memory_and_subgroups(group: ferrorpc.ProcessGroup) -> None:
    """empty, subgroup, mesh."""
    assert_type(group.empty((2, 3)), NDArray[np.float32])
    assert_type(group.empty(4, np.int64), NDArray[np.int64])
    assert_type(group.empty(4, np.dtype(np.float16)), NDArray[np.float16])
    assert_type(group.empty(4, "float64"), NDArray[Any])
    part = group.subgroup([0, 2])
    if part is not None:
        assert_type(part, ferrorpc.ProcessGroup)
        assert_type(part.world_ranks, tuple[int, ...])
    mesh = ferrorpc.Mesh({"dp": 2, "pp": 2}, group)
    assert_type(mesh["dp"], ferrorpc.ProcessGroup)


def store(group: ferrorpc.ProcessGroup) -> None:
    """Small values."""
    group.store.set("epoch", b"3")
    assert_type(group.store.get("epoch", timeout=1.0), bytes)
    assert_type(group.store.add("hits"), int)
    assert_type(group.store.compare_set("leader", None, b"0"), bool)
    assert_type(group.store.keys("done/"), list[str])
    group.store.wait([f"done/{rank}" for rank in range(group.size)])
    group.store.wait("done/0")


def elastic(weights: F32) -> None:
    """Generations come and go."""
    group = ferrorpc.init_process_group(timeout=30.0)
    while True:
        try:
            group.all_reduce(weights, "mean", out=weights)
            break
        except ferrorpc.PeerLostError as error:
            assert_type(error.rank, int)
            group = group.reform()
        except ferrorpc.CollectiveMismatchError as error:
            assert_type(error.signatures, dict[int, str])
            raise
        except ferrorpc.BarrierTimeoutError as error:
            assert_type(error.missing, list[int])
            raise
    assert_type(group.pending_members, list[str])
    with group as same:
        assert_type(same, ferrorpc.ProcessGroup)


def streaming(group: ferrorpc.ProcessGroup, weights: dict[str, F32]) -> dict[str, F32]:
    """Gradients one by one."""
    from_specs = ferrorpc.GradientSynchronizer({"w": ferrorpc.TensorSpec(ferrorpc.DType.FLOAT32, (2, 3))}, group)
    assert_type(from_specs.step().grads, dict[str, NDArray[Any]])
    layers = [{"w": ferrorpc.TensorSpec(ferrorpc.DType.FLOAT32, (2, 3))}]
    assert_type(ferrorpc.GradientSynchronizer(layers, group).step().grads, Any)
    assert_type(ferrorpc.GradientSynchronizer({"layers": layers}, group).step().grads, Any)
    assert_type(ferrorpc.GradientSynchronizer([weights], group).step().grads, list[dict[str, F32]])
    sync = ferrorpc.GradientSynchronizer(weights, group, hook=ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.Compress("int8")))
    with sync.step(weight=8.0) as step:
        for name, weight in weights.items():
            np.multiply(weight, 2, out=step.place(name))
            step.ready(name)
    assert_type(step.grads, dict[str, F32])
    assert_type(sync(weights), dict[str, F32])
    assert_type(sync.sent_bytes, int)
    return sync(weights, weight=2.0)


def normalised(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """Results are of the batch's type."""
    forward = ferrorpc.batch_norm(x, group)
    assert_type(forward.y, F32)
    assert_type(forward.moments.values, int)
    assert_type(ferrorpc.batch_norm_gradient(x, forward, group), F32)
    untold: Normalised = forward
    assert_type(untold.moments.values, int)


def numbered(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """Operations of a stream bring what those of the group do."""
    stream = group.stream()
    assert_type(stream.all_reduce(x, 0, op="mean", out=x, wire="bf16"), ferrorpc.Work[F32])
    assert_type(stream.all_reduce(1.0, 1), ferrorpc.Work[NDArray[Any]])
    assert_type(stream.broadcast(x, 2, root=0), ferrorpc.Work[F32])
    assert_type(stream.all_gather(x, 3, timeout=1.0), ferrorpc.Work[list[F32]])
    assert_type(stream.all_gather(1, 4), ferrorpc.Work[list[NDArray[Any]]])


class Line:
    """A module of one's own."""

    def __init__(self) -> None:
        self.slope = ferrorpc.Parameter(np.zeros(3))

    def parameters(self) -> list[ferrorpc.Parameter]:
        return [self.slope]

    def named_parameters(self) -> list[tuple[str, ferrorpc.Parameter]]:
        return [("slope", self.slope)]

    def forward(self, x: F32) -> F32:
        return x

    def train(self, mode: bool = True) -> Line:
        return self

    def eval(self) -> Line:
        return self

    def backward(self, grad: F32) -> None:
        self.slope.grad = grad


def data_parallel(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """The wrapper knows what it wraps."""
    ddp = ferrorpc.DistributedDataParallel(Line(), group)
    assert_type(ddp.module, Line)
    y = ddp(x)
    ddp.module.backward(y)
    ddp.sync_gradients()
    with ddp.no_sync():
        ddp(x)
    for part in ddp.accumulate(2):
        assert_type(part, int)


class Sign:
    """An update rule of one's own."""

    slots = 0

    def __call__(self, x: np.ndarray[Any, Any], slope: np.ndarray[Any, Any], memory: Sequence[Any], step: int) -> None:
        x -= 1e-4 * np.sign(slope)


def sharded(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """Rules are callable objects with slots."""
    for rule in (ferrorpc.rules.Adam(1e-3), Sign()):
        ferrorpc.ZeroOptimizer({"w": x}, group, rule).step({"w": x})
    ferrorpc.ZeroOptimizer({"w": x}, group, np.sign)  # type: ignore[arg-type]


class Quiet(ferrorpc.hooks.Hook):
    """A hook of one's own."""

    @property
    def text(self) -> str:
        return "quiet"

    def exchange(self, part: ferrorpc.hooks.Part, collectives: ferrorpc.hooks.BucketCollectives) -> ferrorpc.hooks.Exchange:
        yield collectives.all_reduce(part.values)
        return None


class Stage:
    """A stage of a pipeline."""

    def forward(self, x: F32) -> tuple[F32, F32]:
        return x, x

    def backward(self, context: F32, grad_y: F32) -> F32:
        return grad_y


def pipeline(group: ferrorpc.ProcessGroup, x: F32, target: F32) -> None:
    """Schedules are values."""

    def loss_fn(y: F32, target: F32) -> tuple[float, F32]:
        return float((y - target).sum()), y - target

    pipe = ferrorpc.Pipeline(Stage(), group, schedule="1f1b", num_microbatches=8)
    loss = pipe.step(x, target, loss_fn)
    if loss is not None:
        assert float(loss) >= 0
    schedule = ferrorpc.schedules.one_f_one_b(stages=4, microbatches=8)
    assert not schedule.validate()
    timeline = schedule.simulate(forward=1.0, backward_input=1.0, backward_weight=1.0, latency=0.0)
    assert_type(timeline.makespan, float)
    assert_type(timeline.bubble_fraction, float)
    recorded = pipe.recorded()
    again = schedule.simulate(**recorded.costs(schedule), latency=0.1)
    assert_type(again.makespan, float)


def world() -> None:
    """The simulated world gives back what each rank returned."""

    def fn(group: ferrorpc.ProcessGroup) -> int:
        return group.rank

    assert_type(ferrorpc.testing.run_world(4, fn), list[int])
    assert_type(ferrorpc.testing.run_world(4, fn, return_exceptions=True), list[int | BaseException])
    plan = ferrorpc.testing.FaultPlan(kill={1: 0.5})
    assert_type(ferrorpc.testing.run_world(4, fn, faults=None, seed=3), list[int])
    assert_type(ferrorpc.testing.run_world(4, fn, plan, 3), list[int | ferrorpc.testing.RankKilled])
    assert_type(ferrorpc.testing.run_world(4, fn, faults=plan, return_exceptions=True), list[int | BaseException])
    assert_type(ferrorpc.testing.World(4, faults=plan).run(fn), list[int | ferrorpc.testing.RankKilled])
    assert_type(ferrorpc.testing.World(4).run(fn, return_exceptions=True), list[int | BaseException])
    backends = ferrorpc.SimulatedBackend.create_group(2)
    groups = [ferrorpc.ProcessGroup(backend) for backend in backends]
    assert_type(ferrorpc.testing.run_groups(groups, fn), list[int])
    assert_type(ferrorpc.testing.run_groups(groups, fn, return_exceptions=True), list[int | BaseException])
    assert_type(ferrorpc.ProcessGroup(backends[0]).rank, int)


def mistakes(group: ferrorpc.ProcessGroup, x: F32) -> None:
    """What can only be wrong is an error."""
    group.all_reduce("text")  # type: ignore[call-overload]
    group.all_reduce([1.0, 2.0])  # type: ignore[call-overload]
    group.all_reduce(x, src=0)  # type: ignore[call-overload]
    group.all_reduce(x, wire=16)  # type: ignore[call-overload]
