"""Where arrays are, and so the buckets for their gradients: all on one GPU, or on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import gpu_of
from ferrorpc.ddp.hooks.base import Hook, check_hook
from ferrorpc.errors import TensorMismatchError


def bucket_kind(arrays: Mapping[str, Any], hook: Hook | None) -> CupyKind | None:
    """The kind of CuPy arrays where all of the arrays are on one GPU, so that buckets for their gradients lie there.

    Returns:
        None where none is, and with a hook that works on the host.

    Raises:
        TensorMismatchError: they lie on several devices; one array of each is named.
    """
    if hook is not None and not check_hook(hook).on_device:
        return None
    found = {place_of(array): name for name, array in reversed(list(arrays.items()))}
    if len(found) > 1:
        where = ", ".join(f"{name!r} on {place}" for place, name in sorted(found.items()))
        raise TensorMismatchError(
            f"a bucket lies on one device, but these parameters do not: {where}",
            hint="move all to one GPU, or average each device's with a synchroniser of its own",
        )
    return next((gpu_of(array) for array in arrays.values()), None)


def place_of(array: Any) -> str:
    """Where an array is, for people. What CuPy cannot see counts as on the host, whence it is read."""
    gpu = gpu_of(array)
    return "the host" if gpu is None else f"GPU {gpu.device.index}"
