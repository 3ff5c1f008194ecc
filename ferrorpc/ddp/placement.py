"""Finds out where arrays are, and so where buckets for them are allocated: on one GPU, or on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import gpu_of
from ferrorpc.ddp.hooks.base import Hook, check_hook
from ferrorpc.errors import TensorMismatchError
from ferrorpc.group import ProcessGroup


def bucket_kind(arrays: Mapping[str, Any], group: ProcessGroup, hook: Hook | None) -> CupyKind | None:
    """The kind of CuPy arrays on the GPU that is to hold the buckets for these arrays' gradients.

    Returns:
        None for the host: with arrays that are there, and with a hook that works there.

    Raises:
        TensorMismatchError: they are on several devices. It names one array of each. Or as `common_gpu`.
    """
    if hook is not None and not check_hook(hook).on_device:
        return None
    found = {device_name(array): name for name, array in reversed(list(arrays.items()))}
    if len(found) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in sorted(found.items()))
        own = group.capabilities.device
        hint = "move all to one GPU, or average each device's with a synchroniser of its own"
        raise TensorMismatchError(
            f"a bucket lies on one device, but these parameters do not: {where}",
            hint=hint if own is None else f"move all to GPU {own}, which is this rank's",
        )
    return common_gpu(arrays, group)


def common_gpu(arrays: Mapping[str, Any], group: ProcessGroup) -> CupyKind | None:
    """The kind of CuPy arrays on the GPU that all of the arrays are on; None if there is no such GPU.

    Raises:
        TensorMismatchError: the group's collectives refuse arrays of that GPU.
    """
    kinds = {gpu_of(array) for array in arrays.values()}
    kind, own = kinds.pop() if len(kinds) == 1 else None, group.capabilities.device
    if kind is not None and own not in (None, kind.device.index):
        raise TensorMismatchError(
            f"{next(iter(arrays))!r} is on GPU {kind.device.index}, but this rank's communicator is on GPU {own}",
            hint="make arrays on this rank's GPU, which FERRORPC_DEVICE names, or copy them there",
        )
    return kind


def gpus_of(arrays: Iterable[Any]) -> frozenset[CupyKind]:
    """The kinds of CuPy arrays on the GPUs that hold at least one of the arrays."""
    return frozenset(gpu for gpu in map(gpu_of, arrays) if gpu is not None)


def check_not_captured(gpus: Iterable[CupyKind]) -> None:
    """Raises UsageError if a CUDA graph is being captured from the current stream of one of the GPUs.

    A step asks before it begins: what it queues or allocates would be a part of the graph, and once it has begun its errors end
    the generation.
    """
    for gpu in gpus:
        gpu.device.current()


def current_device(kind: CupyKind | None) -> AbstractContextManager[Any]:
    """A context in which the kind's GPU is the current device."""
    return nullcontext() if kind is None else kind.device.here()


def device_name(array: Any) -> str:
    """Where an array is, for messages. Devices that CuPy does not support count as the host, because arrays are read there."""
    gpu = gpu_of(array)
    return "the host" if gpu is None else f"GPU {gpu.device.index}"
