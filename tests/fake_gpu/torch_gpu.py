"""torch's tensors on fake GPUs: torch's own dispatcher and autograd, over the memory and the streams of the stand-in for CuPy.

torch lets a device be written in Python. A tensor there is a place in a fake GPU's memory; what torch does to it is queued on
torch's current stream, and done as late as can be, on a host tensor over the same memory. Only what asks for values waits.
torch has streams of its own beside CuPy's, as on a real GPU.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays import kinds, torch_gpu_kind
from ferrorpc.testing.gpu.machine import FakeEvent, FakeStream
from ferrorpc.testing.gpu.stand_in import StandIn, _Block

torch = pytest.importorskip("torch")
pytree = importlib.import_module("torch.utils._pytree")
registration = importlib.import_module("torch.utils.backend_registration")
if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch takes no devices that are written in Python", allow_module_level=True)

DEVICE = "fakegpu"
ASKING = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Operations that give values, so the host waits for the GPU."""


class TorchGpus:
    """torch on the GPUs of a stand-in.

    Attributes:
        waits: how often the host has waited for a GPU, by the operation that asked.
    """

    active: TorchGpus | None = None

    def __init__(self, cupy: StandIn) -> None:
        self.cupy = cupy
        self.waits: list[str] = []
        self._local = threading.local()

    def stream(self, index: int) -> FakeStream:
        """The calling thread's current one on a GPU."""
        found: FakeStream = getattr(self._local, "streams", {}).get(index, self.cupy.machine.gpus[index].default)
        return found

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        streams = self._local.__dict__.setdefault("streams", {})
        before = streams.get(stream.gpu.index)
        streams[stream.gpu.index] = stream
        try:
            yield
        finally:
            streams[stream.gpu.index] = stream.gpu.default if before is None else before

    def follow(self, before: FakeStream, stream: FakeStream) -> None:
        """Makes a stream the current one, after what is in the other. On CUDA torch's engine does so between two nodes of a
        backward pass, each of which runs in the stream of its forward pass; it asks no device in Python for streams."""
        event = FakeEvent(self.cupy.machine, stream.gpu)
        event.record(before)
        event.hold(stream)
        self._local.__dict__.setdefault("streams", {})[stream.gpu.index] = stream

    def empty(self, shape: Sequence[int], dtype: Any, index: int) -> Any:
        """A new tensor on a GPU, whose memory belongs to torch's current stream."""
        gpu, stream = self.cupy.machine.gpus[index], self.stream(index)
        example = torch.empty(tuple(shape), dtype=dtype, device="meta")
        block = _Block(SimpleNamespace(gpu=gpu, stream=stream), max(example.nbytes, 1))  # type: ignore[arg-type]
        return self.over(block, block.ptr, shape, dtype, example.stride())

    def over(self, block: Any, address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int]) -> Any:
        """A tensor over memory of a GPU that a block holds. Strides in elements."""
        extent = 0 if 0 in shape else 1 + sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
        size = torch.empty(0, dtype=dtype).element_size()
        with self.cupy.machine.lock:
            whole = block.gpu.bytes_at(address, extent * size)
        flat = torch.from_numpy(whole).view(dtype) if extent else torch.empty(0, dtype=dtype)
        return FakeTensor(flat.as_strided(tuple(shape), tuple(strides)), block, address)

    def from_numpy(self, array: np.ndarray[Any, Any], index: int = 0) -> Any:
        """A copy on a GPU."""
        target = self.empty(array.shape, torch.from_numpy(array.copy()).dtype, index)
        target.copy_(torch.from_numpy(array.copy()))
        return target

    def from_dlpack(self, array: Any) -> Any:
        """As `torch.from_dlpack`, of the stand-in's arrays of bytes."""
        assert array.dtype == np.uint8, "what torch makes of other dtypes is not modelled"
        return self.over(array._block, array.data.ptr, array.shape, torch.uint8, array.strides)

    def perform(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What torch's dispatcher asks for."""
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
        gpus = {each.device.index for each in tensors}
        assert len(gpus) == 1, f"{function} of tensors on several GPUs: {gpus}"
        index, returns = gpus.pop(), function._schema.returns
        if function._schema.name in ASKING or _is_host(kwargs.get("device")) or _is_host(getattr(args[0], "device", None)):
            self.waits.append(function._schema.name)
            self.stream(index).synchronize()
            with torch.no_grad():
                return function(*pytree.tree_map(_twin, args), **pytree.tree_map(_twin, kwargs))
        if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
            found = function(*pytree.tree_map(_twin, args), **pytree.tree_map(_twin, kwargs))
            return pytree.tree_map(lambda twin: FakeTensor(twin, args[0].block, twin.data_ptr()), found)
        # Host tensors may change at once: what is read of them is read now.
        given = pytree.tree_map(_as_now, (args, kwargs))
        if function._schema.is_mutable:
            self._queue(index, tensors, lambda: _run(function, given))
            return args[0] if len(returns) == 1 else tuple(args[: len(returns)])
        shapes = function(*pytree.tree_map(_meta, args), **pytree.tree_map(_meta, kwargs))
        outputs = pytree.tree_map(lambda like: self.empty(like.shape, like.dtype, index) if _is_tensor(like) else like, shapes)
        places = [each.twin for each in pytree.tree_leaves(outputs) if isinstance(each, FakeTensor)]

        def compute() -> None:
            results = [each for each in pytree.tree_leaves(_run(function, given)) if _is_tensor(each)]
            for place, result in zip(places, results, strict=True):
                place.copy_(result)

        self._queue(index, tensors, compute)
        return outputs

    def _queue(self, index: int, tensors: Sequence[Any], compute: Any) -> None:
        """As a kernel it keeps no tensor alive; memory that is gone by then is a fault."""
        places = [
            (each.block.gpu, each.twin.data_ptr(), each.twin.element_size() * bool(each.twin.numel())) for each in tensors
        ]

        def run() -> bool:
            for gpu, address, size_bytes in places:
                gpu.bytes_at(address, size_bytes)
            with torch.no_grad():
                compute()
            return True

        self.stream(index).enqueue(run)


class FakeTensor(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor in a fake GPU's memory."""

    twin: Any
    """A host tensor over the same memory, which only tasks of the GPU may look into."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, twin: Any, block: Any, address: int) -> Any:
        found = torch.Tensor._make_wrapper_subclass(
            cls, twin.size(), strides=twin.stride(), dtype=twin.dtype, device=torch.device(DEVICE, block.gpu.index)
        )
        torch._C._set_conj(found, twin.is_conj())
        torch._C._set_neg(found, twin.is_neg())
        found.twin, found.block, found.address = twin, block, address
        return found

    def data_ptr(self) -> int:
        return int(self.address) if self.twin.numel() else 0

    def __repr__(self, **named: Any) -> str:
        return f"FakeTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _active().perform(function, args, kwargs or {})


@contextmanager
def torch_on(cupy: StandIn) -> Iterator[TorchGpus]:
    """torch works on the stand-in's GPUs, as far as ferrorpc can tell."""
    found = TorchGpus.active = TorchGpus(cupy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_gpu_kind, "DEVICE_TYPE", DEVICE)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=found.stream(index).pointer))
        if hasattr(torch._C, "_cuda_getCurrentRawStream"):  # torch was built with CUDA
            patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.stream(index).pointer)
        patch.setattr(torch, "from_dlpack", found.from_dlpack)
        kinds._torch_kind.cache_clear()
        try:
            yield found
        finally:
            kinds._torch_kind.cache_clear()
            TorchGpus.active = None


def _register() -> Any:
    registration._setup_privateuseone_for_python_backend(DEVICE, _module(), _hook(registration._DummyPrivateUse1Hook))
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **named: Any) -> Any:
        return _active().empty(size, dtype or torch.get_default_dtype(), torch.device(device).index or 0)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **named: Any) -> Any:
        found = empty(size, dtype=dtype, device=device)
        return _active().over(found.block, found.address, size, found.dtype, stride)

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library


def _active() -> TorchGpus:
    assert TorchGpus.active is not None, "a tensor outlived the GPUs of its test"
    return TorchGpus.active


def _module() -> Any:
    """What `torch.fakegpu` is: torch asks whatever other device it was built with."""
    return SimpleNamespace(
        is_initialized=lambda: TorchGpus.active is not None,
        is_available=lambda: TorchGpus.active is not None,
        current_device=lambda: 0,
        device_count=lambda: 0 if TorchGpus.active is None else len(TorchGpus.active.cupy.machine.gpus),
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )


def _hook(base: Any) -> Any:
    """Says, in the tests of a process that come later, that there is no such device."""

    class Hook(base):  # type: ignore[misc]
        def is_available(self) -> bool:
            return TorchGpus.active is not None

    return Hook()


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _twin(x: Any) -> Any:
    return x.twin if isinstance(x, FakeTensor) else x


def _as_now(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.twin if isinstance(x, FakeTensor) else x.clone() if _is_tensor(x) else x


def _meta(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if _is_tensor(x) else x


def _run(function: Any, given: Any) -> Any:
    args, kwargs = given
    return function(*args, **kwargs)


_LIBRARY = _register()
"""The device is there as long as this. It is registered when tests are collected: torch's autograd starts its threads once,
with the first backward pass of the process, and only for devices that exist by then."""
