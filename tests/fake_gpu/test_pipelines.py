"""Every schedule on stages whose weights are on GPUs, over the fakes: the bits of one process in NumPy.

The model is that of tests/contract/test_pipelines.py: an edge that skips stages, a stage with two inputs, a tied weight, uneven
microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.arrays import staging
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.kinds import kind_of, view
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.device_lanes import open_lanes
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.messages import Envelope, pack, parse
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.transfers import Transfer, TransferKind
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.contract.test_pipelines import SCHEDULES
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.worlds import host_lanes, nccl_backends
from tests.integration.test_grpc_backend import GrpcWorld
from tests.unit.pipeline.models import Joint, edges_of, one_process, stage_of, ties_of, whole_model
from tests.unit.pipeline.stages import batch, descend, half_square
from tests.waiting import eventually

RANKS = 3
MICROBATCHES = 7
STEPS = 2
ROWS = 2 * MICROBATCHES + 3
LANES = ["simulated", "grpc", "nccl", "hybrid", "cuda_ipc"]


@contextmanager
def groups(cupy: StandIn, lanes: str) -> Iterator[list[ProcessGroup]]:
    if lanes == "grpc":
        with GrpcWorld(RANKS) as world:
            yield [ProcessGroup(backend) for backend in world.backends]
        return
    if lanes == "cuda_ipc":
        with ipc_backends(cupy, RANKS) as backends:
            yield [ProcessGroup(backend) for backend in backends]
        return
    if lanes == "simulated":
        yield [ProcessGroup(backend) for backend in host_lanes(RANKS)]
        return
    kind = {"nccl": NcclBackend, "hybrid": HybridBackend}[lanes]
    yield [ProcessGroup(backend) for backend in nccl_backends(cupy, RANKS, kind=kind)]


def gpu_of(cupy: StandIn, lanes: str, rank: int) -> Any:
    """A rank's own; where memory is shared, that of all."""
    return cupy.cuda.Device(0 if lanes == "cuda_ipc" else rank)


def order(name: str) -> schedules.Schedule:
    return schedules.named(name.partition(" ")[0], RANKS, MICROBATCHES, SCHEDULES[name])


def moved(cupy: StandIn, stage: Joint) -> Joint:
    for parameter in stage.parameters():
        parameter.data = cupy.asarray(parameter.data)
    return stage


def loss_of_the_gpu(y: Any, target: Any) -> tuple[float, Any]:
    """A loss for which the host does not wait."""
    return 0.0, y - target


def arrays_of(stages: Sequence[Joint]) -> list[Any]:
    return [array for stage in stages for each in stage.parameters() for array in (each.data, each.grad)]


@cache
def alone(pieces: int) -> list[np.ndarray[Any, Any]]:
    """Weights and gradients of all pieces after all steps in one process."""
    stages = whole_model(pieces)
    for step in range(STEPS):
        if step:
            descend(stages)
        one_process(stages, *batch(ROWS, seed=step), half_square, MICROBATCHES)
    return arrays_of(stages)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lanes", [lanes for lanes in LANES if lanes != "hybrid"])  # whose GPU arrays go by NCCL as well
def test_every_schedule_has_the_bits_of_one_process(cupy: StandIn, lanes: str, name: str) -> None:
    schedule = order(name)
    pieces = schedule.virtual_stages

    def body(group: ProcessGroup) -> Any:
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True):
            stages = {number: moved(cupy, stage_of(number, pieces)) for number in schedule.pieces(group.rank)}
            pipe = Pipeline(list(stages.values()), group, schedule, edges=edges_of(pieces), tied=ties_of(pieces))
            for step in range(STEPS):
                if step:
                    descend(stages.values())
                pipe.step(*(cupy.asarray(each) for each in batch(ROWS, seed=step)), half_square)
            found = {number: arrays_of([stage]) for number, stage in stages.items()}
            assert all(type(each) is cupy.ndarray for arrays in found.values() for each in arrays)
            return {number: [cupy.asnumpy(each) for each in arrays] for number, arrays in found.items()}

    with groups(cupy, lanes) as world:
        held = {number: arrays for of_rank in run_groups(world, body) for number, arrays in of_rank.items()}
    found = [array for number in sorted(held) for array in held[number]]
    for mine, wanted in zip(found, alone(pieces), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_stages_of_one_rank_may_be_on_different_gpus(cupy: StandIn) -> None:
    class OnGpu(Joint):
        def __init__(self, number: int) -> None:
            super().__init__(number, 1, 1)
            self.gpu = cupy.cuda.Device(number)
            with self.gpu:
                moved(cupy, self)

        def forward(self, x: Any) -> Any:
            with self.gpu:
                return super().forward(x)

        def backward(self, context: Any, grad_y: Any) -> Any:
            with self.gpu:
                return super().backward(context, grad_y)

    def body(group: ProcessGroup) -> Any:
        stages = [OnGpu(0), OnGpu(1), Joint(2, 1, 1)]
        x, target = batch(ROWS)
        with cupy.cuda.Device(0):
            x = cupy.asarray(x)
        Pipeline(stages, group, "looped_bfs", MICROBATCHES).step(x, target, half_square)
        assert [each.weight.grad.device.id for each in stages[:2]] == [0, 1]
        return [view(each).data for each in arrays_of(stages)]

    (found,) = run_groups([ProcessGroup(backend) for backend in host_lanes(1)], body)
    whole = [Joint(number, 1, 1) for number in range(3)]
    one_process(whole, *batch(ROWS), half_square, MICROBATCHES, skips=False, ties=False)
    for mine, wanted in zip(found, arrays_of(whole), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-12)


def test_the_gradient_of_a_tied_weight_stays_in_its_array_on_the_gpu(cupy: StandIn) -> None:
    class InPlace(Joint):
        def backward_weight(self, context: Any, grad_y: Any) -> None:
            kept, self.weight.grad = self.weight.grad, None
            super().backward_weight(context, grad_y)
            kept += self.weight.grad
            self.weight.grad = kept

    def body(group: ProcessGroup) -> Any:
        with gpu_of(cupy, "nccl", group.rank), cupy.cuda.Stream(non_blocking=True):
            stage = moved(cupy, InPlace(group.rank, 1, 1))
            stage.weight.grad = kept = cupy.zeros(stage.weight.data.shape)
            pipe = Pipeline(stage, group, "1f1b", 2, tied=ties_of(RANKS))
            for _ in range(STEPS):
                pipe.step(*(cupy.asarray(each) for each in batch(ROWS)), half_square)
            assert stage.weight.grad is kept
            return cupy.asnumpy(kept)

    with groups(cupy, "nccl") as world:
        found = run_groups(world, body)
    whole = [Joint(number, 1, 1) for number in range(RANKS)]
    whole[-1].weight.data = whole[0].weight.data.copy()
    for _ in range(STEPS):
        one_process(whole, *batch(ROWS), half_square, 2, skips=False, ties=False)
    whole[0].weight.grad = whole[-1].weight.grad = whole[0].weight.grad + whole[-1].weight.grad
    for mine, stage in zip(found, whole, strict=True):
        np.testing.assert_allclose(mine, stage.weight.grad, rtol=1e-12)


@pytest.mark.parametrize("lanes", LANES)
def test_a_microbatch_of_weight_0_is_left_out_over_all_lanes(cupy: StandIn, lanes: str) -> None:
    """What stages tell each other of it lies on no GPU."""
    x, target = batch(6)
    x[2:4] = np.nan

    def body(group: ProcessGroup) -> Any:
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True):
            stage = moved(cupy, stage_of(group.rank, RANKS))
            pipe = Pipeline(stage, group, schedules.one_f_one_b(RANKS, 3), edges=edges_of(RANKS), tied=ties_of(RANKS))
            given = cupy.asarray(x), cupy.asarray(target)
            pipe.step(*given, half_square, weight=lambda rows: float(rows[0, 0]) != target[2, 0])
            return [cupy.asnumpy(each) for each in arrays_of([stage])]

    with np.errstate(invalid="ignore"), groups(cupy, lanes) as world:
        found = [array for of_rank in run_groups(world, body) for array in of_rank]
    kept = whole_model(RANKS)
    one_process(kept, np.delete(x, slice(2, 4), axis=0), np.delete(target, slice(2, 4), axis=0), half_square, 2)
    for mine, wanted in zip(found, arrays_of(kept), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("lanes", LANES)
def test_forward_and_backward_called_apart_give_arrays_on_the_gpu(cupy: StandIn, lanes: str) -> None:
    schedule = order("gpipe")

    def body(group: ProcessGroup) -> Any:
        with gpu_of(cupy, lanes, group.rank):
            stage = moved(cupy, stage_of(group.rank, RANKS))
            pipe = Pipeline(stage, group, schedule, edges=edges_of(RANKS), tied=ties_of(RANKS))
            x, target = (cupy.asarray(each) for each in batch(ROWS))
            y = pipe.forward(x)
            pipe.backward(y, None if y is None else half_square(y, target)[1])
            assert y is None or type(y) is cupy.ndarray
            return [cupy.asnumpy(parameter.grad) for parameter in stage.parameters()]

    whole = whole_model(RANKS)
    one_process(whole, *batch(ROWS), half_square, 1)
    with groups(cupy, lanes) as world:
        for found, stage in zip(run_groups(world, body), whole, strict=True):
            for grad, parameter in zip(found, stage.parameters(), strict=True):
                np.testing.assert_allclose(grad, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lanes", LANES)
def test_a_stage_goes_on_while_its_gpu_has_not_made_what_it_sends(
    cupy: StandIn, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "COPY_SECONDS", 2.0)  # for whoever waits for the GPU
    transfers = [Transfer(0, 1, TransferKind.FORWARD, number) for number in range(3)]

    def body(group: ProcessGroup) -> Any:
        receives = transfers if group.rank == 1 else []
        released: list[bool] = []
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            device_lanes = open_lanes(group, {(0, 1)}, [kind_of(cupy.zeros(1))])
            exchange = Exchange(group, range(RANKS), receives, "gpipe", 0, 20.0, device_lanes, {0: transfers})
            if group.rank == 0:
                stream.fake.enqueue(lambda: bool(released))  # what the stage computes takes long
                y = cupy.asarray(np.zeros(5000))
                for transfer in transfers:
                    y += 1
                    exchange.send(transfer, (y, None))
                assert not released, "the host got here although no GPU has begun"
                released.append(True)
            found = [exchange.receive(transfer, kind_of(cupy.zeros(1))) for transfer in receives]
            exchange.finish()
            return [(cupy.asnumpy(y), nothing) for y, nothing in found]

    with groups(cupy, lanes) as world:
        for number, (y, nothing) in enumerate(run_groups(world, body)[1], 1):
            np.testing.assert_array_equal(y, np.full(5000, number))
            assert nothing is None


def test_when_a_message_leaves_the_arrays_that_it_describes_are_launched(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever reads it can launch its part at once."""
    transfer, launched = Transfer(0, 1, TransferKind.FORWARD, 0), []

    def body(group: ProcessGroup) -> None:
        with gpu_of(cupy, "cuda_ipc", group.rank), cupy.cuda.Stream(non_blocking=True):
            kind = kind_of(cupy.zeros(1))
            device_lanes = open_lanes(group, {(0, 1)}, [kind])
            exchange = Exchange(group, range(RANKS), [transfer] * (group.rank == 1), "", 0, 20.0, device_lanes, {0: [transfer]})
            if group.rank == 0:
                send, lane = group.send, device_lanes[0, 1]
                before = lane._backend.context.program.next_number

                def noting(*args: Any, **options: Any) -> Any:
                    launched.append(lane._backend.context.program.last_event is not last)
                    assert lane._backend.context.program.next_number == before + 1
                    return send(*args, **options)

                last = lane._backend.context.program.last_event
                monkeypatch.setattr(group, "send", noting)
                exchange.send(transfer, cupy.zeros(3))
            elif group.rank == 1:
                assert cupy.asnumpy(exchange.receive(transfer, kind)).tolist() == [0.0] * 3
            exchange.finish()

    with groups(cupy, "cuda_ipc") as world:
        run_groups(world, body)
    assert launched == [True]


@pytest.mark.parametrize("lanes", LANES)
def test_where_a_backend_moves_arrays_from_gpu_to_gpu_stages_send_nothing_through_the_host(
    cupy: StandIn, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step: list[int] = []
    through_host: list[int] = []
    download = Device.download

    def noted(self: Device, target: Any, source: Any, stream: Any) -> None:
        through_host.extend(source.nbytes for _ in in_step)
        download(self, target, source, stream)

    def body(group: ProcessGroup) -> None:
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            stage = moved(cupy, stage_of(group.rank, RANKS))
            pipe = Pipeline(stage, group, order("1f1b"), edges=edges_of(RANKS))
            group.barrier()
            in_step.append(group.rank)
            pipe.step(*(cupy.asarray(each) for each in batch(ROWS)), loss_fn=half_square)
            stream.synchronize()

    monkeypatch.setattr(Device, "download", noted)
    with groups(cupy, lanes) as world:
        run_groups(world, body)
    assert bool(through_host) == (lanes in ("simulated", "grpc"))


class Failing(Joint):
    """A stage that fails at its third microbatch."""

    left = 2

    def forward(self, x: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("no more")
        return super().forward(x)


@pytest.mark.parametrize("lanes", ["nccl", "hybrid", "cuda_ipc"])
@pytest.mark.parametrize("failing", range(RANKS))
def test_a_stage_that_fails_ends_the_step_of_all(cupy: StandIn, lanes: str, failing: int) -> None:
    def body(group: ProcessGroup) -> type[BaseException]:
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            stage = moved(cupy, stage_of(group.rank, RANKS))
            if group.rank == failing:
                stage.__class__ = Failing
            pipe = Pipeline(stage, group, order("1f1b"), edges=edges_of(RANKS))
            group.barrier()
            with pytest.raises((ArithmeticError, FerroError)) as caught:
                pipe.step(*(cupy.asarray(each) for each in batch(ROWS)), loss_fn=half_square)
            stream.synchronize()  # nothing waits on the GPU for what does not come any more
            return caught.type

    with groups(cupy, lanes) as world:
        found = run_groups(world, body)
    assert found[failing] is ArithmeticError
    assert all(issubclass(each, GroupAbortedError) for rank, each in enumerate(found) if rank != failing)


@pytest.mark.parametrize("lanes", ["nccl", "hybrid", "cuda_ipc"])
@pytest.mark.parametrize("cause", [GroupAbortedError, CollectiveTimeoutError])
def test_a_step_raises_what_keeps_its_arrays_from_coming(cupy: StandIn, lanes: str, cause: type[FerroError]) -> None:
    """Nobody updates weights with gradients that never came."""
    last, released, all_have_raised = RANKS - 1, list[bool](), threading.Barrier(RANKS)

    def body(group: ProcessGroup) -> FerroError:
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            stage = moved(cupy, stage_of(group.rank, RANKS))
            pipe = Pipeline(stage, group, order("1f1b"), edges=edges_of(RANKS))
            given = [cupy.asarray(each) for each in batch(ROWS)]
            pipe.step(*given, loss_of_the_gpu)
            if group.rank == last:
                stream.fake.enqueue(lambda: bool(released))
            if group.rank == 0 and cause is GroupAbortedError:
                threading.Timer(0.3, group.abort, ["enough"]).start()
            with pytest.raises(FerroError) as caught:
                pipe.step(*given, loss_of_the_gpu, timeout=0.5 if cause is CollectiveTimeoutError else None)
            all_have_raised.wait(20.0)
            released.append(True)
            return caught.value

    with groups(cupy, lanes) as world:
        found = run_groups(world, body)
    assert any(isinstance(each, cause) for each in found)
    assert all(isinstance(each, (cause, GroupAbortedError)) for each in found), found


@pytest.mark.parametrize("lanes", ["nccl", "hybrid", "cuda_ipc"])
def test_a_rank_whose_host_waits_for_arrays_that_do_not_come_is_freed(cupy: StandIn, lanes: str) -> None:
    """It waits within its stage, so it gets to no wait of the pipeline's."""
    transfer, released = Transfer(0, 1, TransferKind.FORWARD, 0), list[bool]()

    def body(group: ProcessGroup) -> None:
        with gpu_of(cupy, lanes, group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            kind = kind_of(cupy.zeros(1))
            device_lanes = open_lanes(group, {(0, 1)}, [kind])
            exchange = Exchange(group, range(RANKS), [transfer] * (group.rank == 1), "", 0, 0.2, device_lanes, {0: [transfer]})
            if group.rank == 0:
                stream.fake.enqueue(lambda: bool(released))
                exchange.send(transfer, cupy.zeros(3))
            elif group.rank == 1:
                exchange.receive(transfer, kind)
            cause = eventually(lambda: group._backend.latch.cause, "the generation ends", 10.0)
            assert isinstance(cause, CollectiveTimeoutError | GroupAbortedError)
            assert "broadcast(root=0)" in cause.message
            released.append(True)
            exchange.abandon()

    with groups(cupy, lanes) as world:
        run_groups(world, body)


def test_what_has_arrived_is_not_kept_until_the_end_of_the_step(cupy: StandIn) -> None:
    transfers = [Transfer(0, 1, TransferKind.FORWARD, number) for number in range(4)]

    def body(group: ProcessGroup) -> None:
        receives = transfers if group.rank == 1 else []
        with gpu_of(cupy, "nccl", group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            kind = kind_of(cupy.zeros(1))
            device_lanes = open_lanes(group, {(0, 1)}, [kind])
            exchange = Exchange(group, range(RANKS), receives, "", 0, 20.0, device_lanes, {0: transfers})
            for transfer in transfers if group.rank == 0 else []:
                exchange.send(transfer, cupy.zeros(3))
            for transfer in receives:
                exchange.receive(transfer, kind)
                stream.synchronize()
                device_lanes[0, 1].synchronize()
                assert len(exchange._arrivals) == 1
            exchange.finish()

    with groups(cupy, "nccl") as world:
        run_groups(world, body)


def test_arrays_of_several_gpus_and_of_the_host_go_in_one_message(cupy: StandIn) -> None:
    with cupy.cuda.Device(1):
        far = cupy.asarray(np.arange(7.0))
    near, here = cupy.asarray(np.arange(3, dtype=np.int16)), np.arange(4) > 1
    envelope = Envelope("gpipe", 3, "0SEND_F1")
    found = parse(pack(envelope, (near, far, here)))
    assert found.envelope == envelope
    values = found.value(found.payload, kind_of(here))
    for value, wanted in zip(values, (np.arange(3, dtype=np.int16), np.arange(7.0), here), strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("shown", ["like", "parameters", "parameters with data"])
def test_a_stage_shows_on_which_gpu_it_computes(cupy: StandIn, shown: str) -> None:
    array = cupy.zeros(3)
    stage = Joint(0, 1, 1)
    stage.parameters = lambda: iter([SimpleNamespace(data=array) if "data" in shown else array])
    if shown == "like":
        stage.like = array
    assert Piece(stage, 0).kind is kind_of(array)
