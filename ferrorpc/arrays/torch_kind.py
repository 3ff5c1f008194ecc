"""PyTorch tensors. torch is never imported here: a caller with a tensor has imported it.

Host tensors are read and written in place; tensors elsewhere are copied through the host, by torch, unless they are where CuPy
can see them (torch_gpu_kind.py). bfloat16, which NumPy lacks, is seen through a 16-bit view.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View, check_spec, check_writable, contiguous, owned_array
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, TensorSpec, dtype_named


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor; False where torch was never imported."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


class TorchKind(Kind):
    """Tensors on one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._strided = sys.modules["torch"].strided

    def view(self, x: Any) -> View:
        spec = self.spec(x)
        x = x.detach().resolve_conj().resolve_neg()
        origin = _host_array(x if self._on_host else x.cpu())
        data = contiguous(origin)
        borrowed = self._on_host and data is origin
        return View(self, spec, data, borrowed, origin if self._on_host else None)

    def spec(self, x: Any) -> TensorSpec:
        if x.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise UsageError(
                "the tensor requires a gradient, which does not flow through this call",
                hint="pass x.detach(), or call it within torch.no_grad()",
            )
        if x.is_meta:
            raise UsageError("the tensor is on the meta device, so it has no elements", hint="pass one that has data")
        if x.is_nested:
            raise UsageError("the tensor is nested: its rows differ in length", hint="send x.values(), or each of x.unbind()")
        if x.layout is not self._strided:
            hint = "pass x.to_dense(); for a gradient, make the module with sparse=False"
            raise UsageError(f"the tensor's layout is {x.layout}", hint=hint)
        return TensorSpec(dtype_named(str(x.dtype).removeprefix("torch.")), tuple(x.shape))

    def out(self, x: Any, spec: TensorSpec) -> Out:
        check_spec(self.spec(x), spec)
        check_not_lazy(x)
        plain = x.detach()
        if not self._on_host:
            return Out(x, spec, None, lambda data: plain.copy_(_tensor(data, spec)))
        origin = _host_array(plain)
        check_writable(origin)
        return Out(x, spec, origin)

    def memory(self, x: Any) -> np.ndarray[Any, Any] | None:
        torch = sys.modules["torch"]
        if not self._on_host or type(x) is not torch.Tensor or x.dtype is torch.bfloat16:  # which NumPy lacks
            return None
        try:
            array: np.ndarray[Any, Any] = x.numpy()
        except (RuntimeError, TypeError):  # such as one that requires a gradient, or is sparse
            return None
        return array if x.data_ptr() else None

    def will_write(self, x: Any) -> None:
        if not x.is_inference():  # such a tensor is in no graph
            sys.modules["torch"].autograd.graph.increment_version(x)

    def wrap(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
        tensor = _tensor(owned_array(data, spec), spec)
        return tensor if self._on_host else tensor.to(self._device)

    def alias(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any | None:
        return _tensor(data.reshape(spec.shape), spec) if self._on_host else None

    def pointer_of(self, x: Any) -> int:
        return int(x.data_ptr()) if x.layout is self._strided else 0

    def takes_any_order(self, x: Any) -> bool:
        # Fused optimizers go through weights and gradients in memory order and ignore strides.
        return bool(x.is_contiguous())

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype.label), device=self._device)

    def empty_beside(self, x: Any, spec: TensorSpec) -> Any:
        torch = sys.modules["torch"]
        return torch.empty_like(x.detach(), dtype=getattr(torch, spec.dtype.label))


def check_not_lazy(x: Any) -> None:
    """Raises TensorMismatchError where what is written to a tensor's memory is not what is read from it."""
    if x.is_conj() or x.is_neg():
        raise TensorMismatchError("out is a lazily conjugated or negated view", hint="pass x.resolve_conj().resolve_neg()")


def _host_array(x: Any) -> np.ndarray[Any, Any]:
    """The tensor's memory in its own layout, in the storage dtype. Raises UsageError if it has none of its own."""
    torch = sys.modules["torch"]
    array: np.ndarray[Any, Any]
    try:
        array = x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()
        if array.size and not x.data_ptr():  # within functionalize; numpy() gives whatever lies there
            raise RuntimeError("it has no memory of its own")
    except RuntimeError as problem:
        hint = "pass a plain torch.Tensor, outside of torch.vmap, torch.func and FakeTensorMode"
        raise UsageError(f"the elements of a {type(x).__name__} are not accessible: {problem}", hint=hint) from None
    return array


def _tensor(data: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
    """A host tensor on the memory of `data`."""
    torch = sys.modules["torch"]
    if spec.dtype is DType.BFLOAT16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)
