"""PyTorch tensors in a GPU's memory, seen as CuPy arrays: the same memory in both libraries, so nothing is copied.

Inputs are seen by their address, results are passed on by DLPack. So everything written for CuPy arrays (NCCL, CUDA IPC, pinned
memory, kernels, buckets) works with these tensors. Streams are torch's: `Device` follows them. New results are in memory of
CuPy's pool, which gets it back when the tensor is deleted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.base import GpuKind, Out, View, check_spec
from ferrorpc.arrays.cupy_kind import CupyKind, cupy_kind
from ferrorpc.arrays.device import DeviceArray
from ferrorpc.arrays.devices import open_device
from ferrorpc.arrays.staging import Staging
from ferrorpc.arrays.torch_cuda import current_of_torch
from ferrorpc.arrays.torch_kind import TorchKind, check_not_lazy
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.types import DType, TensorSpec

DEVICE_TYPE: Final = "cuda"
_log = logging.getLogger("ferrorpc.arrays")


class TorchGpuKind(GpuKind, TorchKind):
    """Tensors on one GPU.

    Args:
        device_kind: the kind of CuPy arrays on that GPU.
    """

    def __init__(self, device: Any, device_kind: CupyKind) -> None:
        super().__init__(device)
        self._device_kind = device_kind

    @property
    def device_kind(self) -> CupyKind:
        """As `Kind.device_kind`."""
        return self._device_kind

    @property
    def staging(self) -> Staging:
        """As `Kind.staging`."""
        return self._device_kind.staging

    def view_on_device(self, x: Any) -> View:
        spec = self.spec(x)
        if x.is_conj() or x.is_neg():
            x = self._resolved(x)
        seen = self._device_kind.view_on_device(self._seen(x, spec))
        return seen._replace(kind=self, spec=spec)

    def out(self, x: Any, spec: TensorSpec) -> Out:
        check_spec(self.spec(x), spec)
        check_not_lazy(x)
        return self._device_kind.out_through_host(x, self._seen(x, spec), spec)

    def out_on_device(self, x: Any, spec: TensorSpec) -> Out:
        check_spec(self.spec(x), spec)
        check_not_lazy(x)
        return self._device_kind.out_where_it_is(x, self._seen(x, spec), spec)

    def wrap(self, data: Any, spec: TensorSpec) -> Any:
        if not data.size:
            return super().empty(spec.shape, spec.dtype)
        if isinstance(data, np.ndarray):
            data = self.staging.to_device(data)
        torch = sys.modules["torch"]
        with self._device_kind.device.here():  # otherwise from_dlpack makes torch's stream wait for CuPy's current one
            raw = torch.from_dlpack(data.reshape(-1).view(np.uint8))
        return raw.view(getattr(torch, spec.dtype.label)).reshape(spec.shape)

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        device = self._device_kind.device
        if device.follows_torch():
            return super().empty(shape, dtype)
        # torch's memory would belong to its own stream, which may still use it.
        return self.wrap(device.empty(shape, dtype.storage), TensorSpec(dtype, tuple(shape)))

    def address(self, x: Any) -> int:
        if x.layout is not self._strided or x.device != self._device or not x.is_contiguous():
            return 0
        return 0 if x.requires_grad or x.is_conj() or x.is_neg() else int(x.data_ptr())

    def _resolved(self, x: Any) -> Any:
        """A lazily conjugated or negated tensor as torch computes it: in torch's stream, which may not be the caller's."""
        device = self._device_kind.device
        caller, theirs = device.current(), device.adopt(current_of_torch(device.index))
        theirs.wait(caller.record())
        found = x.resolve_conj().resolve_neg()
        caller.wait(theirs.record())
        return found

    def _seen(self, x: Any, spec: TensorSpec) -> DeviceArray:
        """The memory of a tensor as it lies, as a CuPy array in storage dtype, which keeps the tensor."""
        itemsize = spec.dtype.itemsize
        return self._device_kind.device.over(
            x.data_ptr(), spec.shape, spec.dtype.storage, [itemsize * each for each in x.stride()], x
        )


def gpu_kind_of(device: Any) -> TorchGpuKind | None:
    """The kind of the tensors on one of torch's devices; None where that is no GPU, or CuPy cannot be had.

    CuPy is imported here, if it is installed, because a program with a tensor on a GPU works there.
    """
    if device.type != DEVICE_TYPE:
        return None
    try:
        found = open_device(device.index)
    except BackendUnavailableError as error:
        _log.warning("torch's tensors on %s are copied through the host by torch: %s; %s", device, error.reason, error.hint)
        return None
    return TorchGpuKind(device, cupy_kind(found.index))
