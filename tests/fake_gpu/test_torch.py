"""torch's tensors on GPUs, over the fakes: seen as CuPy arrays in torch's own streams, without a copy and without waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ferrorpc.testing
from ferrorpc.arrays import kinds
from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.kinds import gpu_of, kind_of, packed_bytes, to_kind, view, view_out
from ferrorpc.backends import gpu
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl import choose
from ferrorpc.errors import BackendUnavailableError, TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import DType, TensorSpec
from tests.fake_gpu.on_gpu import Tensors
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.test_ddp import SHAPES, check, gradients
from tests.fake_gpu.torch_gpu import DEVICE, TorchGpus, torch, torch_on
from tests.fake_gpu.worlds import host_lanes, nccl_backends

Array = np.ndarray[Any, Any]
LANES = ["simulated", "hybrid", pytest.param("cuda_ipc", marks=pytest.mark.shared_memory)]


@pytest.fixture
def gpus(cupy: StandIn) -> Iterator[TorchGpus]:
    with torch_on(cupy) as found:
        yield found


def world(gpus: TorchGpus, lanes: str, size: int, fn: Callable[[ProcessGroup, int], Any], autograd: bool = False) -> list[Any]:
    """fn(group, its GPU) on every rank, each in a stream of torch's own; in the null stream where torch's autograd works, whose
    threads do not take over streams of the tests' device."""

    def run(backends: Any, is_shared: bool = False) -> list[Any]:
        def body(group: ProcessGroup) -> Any:
            index = 0 if is_shared else group.rank
            device = gpus.cupy.machine.gpus[index]
            with gpus.cupy.cuda.Device(index), gpus.on(device.default if autograd else device.new_stream()):
                return fn(group, index)

        return run_groups([ProcessGroup(backend) for backend in backends], body)

    if lanes == "cuda_ipc":
        with ipc_backends(gpus.cupy, size) as backends:
            return run(backends, is_shared=True)
    return run(host_lanes(size) if lanes == "simulated" else nccl_backends(gpus.cupy, size, kind=HybridBackend))


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)], ids=str)
def test_every_dtype_is_seen_where_it_is_and_comes_back(gpus: TorchGpus, dtype: DType, shape: tuple[int, ...]) -> None:
    bits = np.arange(np.prod(shape, dtype=int) * dtype.itemsize, dtype=np.uint8) % 2
    x = gpus.from_numpy(bits).view(getattr(torch, dtype.label)).reshape(shape)
    seen = view(x, on_device=True)
    assert (seen.spec, seen.borrowed) == (TensorSpec(dtype, shape), True)
    assert isinstance(seen.data, gpus.cupy.ndarray)
    assert seen.data.data.ptr == x.data_ptr()
    assert seen.data.dtype == dtype.storage
    again = to_kind(seen.kind, seen.data, seen.spec)
    assert (again.dtype, tuple(again.shape), again.device) == (x.dtype, shape, x.device)
    assert again.data_ptr() == x.data_ptr()
    assert not gpus.waits
    assert view(x).data.tobytes() == bits.tobytes()
    home = to_kind(seen.kind, bits.view(dtype.storage).reshape(shape), seen.spec)
    assert view(home).data.tobytes() == bits.tobytes()


def test_tensors_are_seen_in_any_layout_and_kept(gpus: TorchGpus) -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = gpus.from_numpy(host)
    assert np.array_equal(view(x.T).data, host.T)
    assert np.array_equal(view(x[:, 1::2]).data, host[:, 1::2])
    assert np.array_equal(view(x.expand(2, 3, 4)).data, np.broadcast_to(host, (2, 3, 4)))
    whole = gpus.from_numpy(host.astype(np.complex64) * 1j)
    assert np.array_equal(view(whole.conj()).data, (host * 1j).conj())
    seen = view(x, on_device=True).data
    del x
    gpus.cupy.machine.settle()
    assert np.array_equal(gpus.cupy.asnumpy(seen), host), "the tensor is kept by what sees it"


def test_what_cannot_be_passed_is_refused_as_on_the_host(gpus: TorchGpus) -> None:
    x = gpus.from_numpy(np.zeros(6, np.float32))
    with pytest.raises(UsageError, match="requires a gradient"):
        view(x.detach().requires_grad_(), on_device=True)
    lazy = gpus.from_numpy(np.zeros(2, np.complex64)).conj()
    for near in (True, False):
        with pytest.raises(TensorMismatchError, match="conjugated"):
            view_out(lazy, TensorSpec(DType.COMPLEX64, (2,)), near)
        with pytest.raises(TensorMismatchError, match=r"out is float32\[6\]"):
            view_out(x, TensorSpec(DType.FLOAT32, (5,)), near)
        with pytest.raises(TensorMismatchError, match="share memory"):
            view_out(x[:1].expand(4), TensorSpec(DType.FLOAT32, (4,)), near)
    with pytest.raises(UsageError, match="overlaps"):
        view_out(x[1:5], TensorSpec(DType.FLOAT32, (4,)), on_device=True).is_in_place(view(x[:4], on_device=True))
    assert view_out(x, TensorSpec(DType.FLOAT32, (6,)), on_device=True).is_in_place(view(x, on_device=True))


def test_the_callers_stream_is_cupys_or_else_torchs(gpus: TorchGpus) -> None:
    cupy, device = gpus.cupy, device_of(gpus.cupy, 1)
    theirs, own = cupy.machine.gpus[1].new_stream(), None
    with cupy.cuda.Device(1):
        own = cupy.cuda.Stream(non_blocking=True)
    assert device.current().pointer == 0
    with gpus.on(theirs):
        assert device.current().pointer == theirs.pointer
        assert device_of(cupy, 0).current().pointer == 0, "it is another GPU's"
        with device.here():
            assert cupy.stream is theirs, "what CuPy does for the library it does there"
        assert cupy.cuda.Device().id == 0
        with device.on(device.adopt(own)):
            assert device.current().pointer == own.ptr, "who chose a stream of CuPy's meant it"
    assert device.current().pointer == 0


def test_a_lazy_tensor_is_read_once_torch_has_computed_it_whichever_stream_is_the_callers(gpus: TorchGpus) -> None:
    cupy, busy = gpus.cupy, [True]
    host = np.arange(4) + 1j
    x = gpus.from_numpy(host)
    cupy.machine.settle()
    gpus.stream(0).enqueue(lambda: not busy)
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        seen = view(x.conj(), on_device=True).data
        copy = seen.copy()
        busy.clear()
        np.testing.assert_array_equal(cupy.asnumpy(copy), host.conj())
        del seen


def test_memory_that_is_made_in_torchs_stream_goes_back_to_it(gpus: TorchGpus) -> None:
    """Else what CuPy makes next could have it while that stream still works with it."""
    device, stream = device_of(gpus.cupy, 0), gpus.cupy.machine.gpus[0].new_stream()
    with gpus.on(stream):
        made = device.empty((4,), np.dtype(np.float32))
    address = made.data.ptr
    stream.enqueue(lambda: bool(stream.gpu.bytes_at(address, 16).size))  # a kernel that still uses it
    del made
    gpus.cupy.machine.settle()
    assert stream.gpu.memory.find(address, 16) is None
    assert not gpus.cupy.machine.faults


@pytest.mark.parametrize("shape", [(4,), (0,)])
def test_what_is_made_for_a_stream_of_cupys_belongs_to_that_one(gpus: TorchGpus, shape: tuple[int, ...]) -> None:
    """torch would make it of memory with which its own stream may still work."""
    theirs = gpus.cupy.machine.gpus[0].new_stream()
    kind = kind_of(gpus.from_numpy(np.zeros(3, np.float32)))
    with gpus.on(theirs), gpus.cupy.cuda.Stream(non_blocking=True) as chosen:
        made = kind.empty(shape, DType.BFLOAT16)
        assert (tuple(made.shape), made.dtype, made.device.type) == (shape, torch.bfloat16, DEVICE)
        assert not made.numel() or made.block._stream.pointer == chosen.ptr
    with gpus.on(theirs):
        assert kind.empty((4,), DType.BFLOAT16).block._stream is theirs


@pytest.mark.parametrize("lanes", LANES)
def test_operations_follow_what_torch_computes_and_torch_follows_them_without_the_host(gpus: TorchGpus, lanes: str) -> None:
    def body(group: ProcessGroup, index: int) -> Any:
        x = gpus.from_numpy(np.full(5000, group.rank + 1, np.float32), index)
        for _ in range(3):
            x = x * 2
        y = group.all_reduce(x) + 1
        group.all_reduce(y, op="max", out=y)
        z = group.all_gather(y[:2], async_op=True).wait()[-1] * 2
        waits = list(gpus.waits)
        group.barrier()
        return waits, y.cpu().numpy(), z.cpu().numpy()

    for waits, y, z in world(gpus, lanes, 2, body):
        assert not waits
        assert (y == 3 * 8 + 1).all()
        assert (z == 50).all()
        assert len(z) == 2


@pytest.mark.parametrize("weights", [None, [3.0, 0.5]], ids=["even", "weighted"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("lanes", LANES)
def test_means_of_gradients_have_the_bits_of_one_process(
    gpus: TorchGpus, lanes: str, dtype: Any, weights: list[float] | None
) -> None:
    def body(group: ProcessGroup, index: int) -> Any:
        mine = {name: gpus.from_numpy(array, index) for name, array in gradients(group.rank, dtype).items()}
        sync = ferrorpc.GradientSynchronizer(mine, group, bucket_cap_mb=5e-5)
        found = [sync(mine, weight=None if weights is None else weights[group.rank])]
        with sync.step(weight=None if weights is None else weights[group.rank]) as step:
            for name in reversed(SHAPES):
                place = step.place(name)
                assert gpu_of(place) is gpu_of(mine[name])
                place.copy_(mine[name])
                step.ready(name)
        found.append(step.grads)
        assert all(each.device == mine["bias"].device for tree in found for each in tree.values())
        return [{name: Tensors(DEVICE).home(each) for name, each in tree.items()} for tree in found]

    results = world(gpus, lanes, 2, body)
    for turn in range(2):
        check([found[turn] for found in results], [gradients(rank, dtype) for rank in range(2)], weights)


def test_bits_are_laid_out_for_a_message_on_their_gpu(gpus: TorchGpus) -> None:
    x, tail = gpus.from_numpy(np.arange(4, dtype=np.float32)), np.arange(3, dtype=np.uint8)
    whole = packed_bytes([(slice(0, 16), view(x, on_device=True))], 16, tail)
    assert isinstance(whole, gpus.cupy.ndarray)
    assert gpus.cupy.asnumpy(whole).tobytes() == np.arange(4, dtype=np.float32).tobytes() + tail.tobytes()


def test_where_cupy_cannot_be_had_torch_copies_them_and_the_log_says_so(
    gpus: TorchGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(index: int) -> None:
        raise BackendUnavailableError("there is no CuPy", "install it")

    monkeypatch.setattr("ferrorpc.arrays.torch_gpu_kind.open_device", nothing)
    kinds._torch_kind.cache_clear()
    with caplog.at_level(logging.WARNING):
        x = gpus.from_numpy(np.arange(4, dtype=np.float32))
        seen = view(x, on_device=True)
        view(x, on_device=True)
    assert [record.message for record in caplog.records] == [
        "torch's tensors on fakegpu:0 are copied through the host by torch: there is no CuPy; install it"
    ]
    assert isinstance(seen.data, np.ndarray)
    assert gpu_of(x) is None
    again = to_kind(kind_of(x), seen.data.copy(), seen.spec)
    assert (again.device, again.cpu().tolist()) == (x.device, [0, 1, 2, 3])


def test_a_broken_cupy_leaves_torchs_tensors_to_torch(
    gpus: TorchGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not fit the NumPy beside it raises a ValueError, for instance."""

    def broken(name: str) -> None:
        raise ValueError("numpy.dtype size changed")

    monkeypatch.setattr("ferrorpc.arrays.devices.importlib.import_module", broken)
    kinds._torch_kind.cache_clear()
    x = gpus.from_numpy(np.arange(4, dtype=np.float32))
    assert view(x).data.tolist() == [0, 1, 2, 3]
    assert "numpy.dtype size changed" in caplog.text


def test_auto_looks_for_a_gpu_where_torch_has_begun_to_use_one(
    gpus: TorchGpus, cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "open_nccl", lambda: SimpleNamespace(version=FakeNccl(cupy.machine).api(0).version))
    monkeypatch.setattr(gpu, "sys", SimpleNamespace(modules={}))
    assert gpu.join_labels("auto", None, 1)["gpu"] == device_of(cupy, 1).uuid
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpu.join_labels("auto", None, 1) == {}


def test_a_ranks_gpu_is_the_one_that_torch_was_told_to_use(gpus: TorchGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [3]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    assert gpu.device_for(None, 1).index == 3
    assert gpu.device_for(5, 1).index == 5
    current[0] = 0  # nobody may have told it so
    assert gpu.device_for(None, 1).index == 1
    current[0] = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpu.device_for(None, 1).index == 1


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
@pytest.mark.parametrize("lanes", ["simulated", pytest.param("cuda_ipc", marks=pytest.mark.shared_memory)])
def test_stages_of_torch_on_one_gpu_have_the_bits_of_the_host(gpus: TorchGpus, lanes: str, name: str) -> None:
    """One GPU for all, because torch's autograd has a thread for each that a device of the tests' kind does not get."""
    tensors = {part: np.random.default_rng(part).standard_normal((7, 4)).astype(np.float32) for part in range(2)}
    begins = [torch.nn.Linear(4, 4).state_dict() for rank in range(2)]

    def step(group: ProcessGroup, device: str) -> list[Any]:
        linear = torch.nn.Linear(4, 4)
        linear.load_state_dict(begins[group.rank])
        module = torch.nn.Sequential(linear, torch.nn.Tanh()).to(device)
        pipe = ferrorpc.Pipeline(ferrorpc.torch.Stage(module), group, schedule=name, num_microbatches=3)
        x, target = (torch.from_numpy(tensors[part]).to(device) for part in range(2))
        loss = pipe.step(x, target, ferrorpc.torch.with_gradient(torch.nn.functional.mse_loss))
        found = [each.grad for each in module.parameters()] + [each for each in [loss] if each is not None]
        assert {str(each.device) for each in found} == {device}
        return [each.detach().cpu().numpy().tobytes() for each in found]

    expected = ferrorpc.testing.run_world(2, lambda group: step(group, "cpu"))
    assert world(gpus, lanes, 2, lambda group, index: step(group, f"{DEVICE}:0"), autograd=True) == expected


@pytest.mark.parametrize("lanes", LANES)
def test_an_optimizer_that_is_shared_out_has_the_bits_of_the_host(gpus: TorchGpus, lanes: str) -> None:
    shapes = {"a": (70, 10), "b": (333,), "none": (0,), "c": (9, 2, 5)}

    def steps(group: ProcessGroup, place: Callable[[Array], Any]) -> list[bytes]:
        chance = np.random.default_rng(7)
        drawn = {name: place(chance.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
        weights = {name: each.requires_grad_() for name, each in drawn.items()}
        optimizer = ferrorpc.torch.ZeroOptimizer(weights.values(), torch.optim.AdamW, group, lr=0.1, bucket_cap_mb=1e-3)
        chance = np.random.default_rng([group.rank, 8])
        for _ in range(2):
            for name, each in weights.items():
                each.grad = place(chance.standard_normal(shapes[name]).astype(np.float32)) if name != "c" else None
            optimizer.step()
            gathered = [optimizer.gather_state_dict(root) for root in range(group.size)][group.rank]
            optimizer = ferrorpc.torch.ZeroOptimizer(weights.values(), torch.optim.AdamW, group, lr=0.1, bucket_cap_mb=1e-3)
            optimizer.load_state_dict(gathered)
        return [Tensors(DEVICE).home(each).tobytes() for each in weights.values()]

    wanted = ferrorpc.testing.run_world(2, lambda group: steps(group, torch.from_numpy))
    assert world(gpus, lanes, 2, lambda group, index: steps(group, lambda array: gpus.from_numpy(array, index))) == wanted


def test_a_step_of_such_an_optimizer_is_refused_while_a_graph_is_captured(gpus: TorchGpus) -> None:
    def body(group: ProcessGroup, index: int) -> None:
        weights, stream = gpus.from_numpy(np.ones(20, np.float32), index), gpus.stream(index)
        optimizer = ferrorpc.torch.ZeroOptimizer([weights.requires_grad_()], torch.optim.SGD, group, lr=0.5)
        stream.captured = True
        with pytest.raises(UsageError, match="a CUDA graph is being captured from the current stream"):
            optimizer.step()
        stream.captured = False
        optimizer.step()

    world(gpus, "hybrid", 2, body)
