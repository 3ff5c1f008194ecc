"""Where arrays are, and so the buckets for their gradients: all on one GPU, or on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.ddp.hooks.base import Hook, check_hook
from ferrorpc.errors import TensorMismatchError


def bucket_kind(arrays: Mapping[str, Any], hook: Hook | None) -> CupyKind | None:
    """The kind of the arrays where all of them are CuPy arrays on one GPU, so that buckets for their gradients lie there.

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
    kinds = [kind_of(array) for array in arrays.values()]
    return kinds[0] if kinds and isinstance(kinds[0], CupyKind) else None


def place_of(array: Any) -> str:
    """Where an array is, for people. What is no CuPy array counts as on the host, whence it is read."""
    return f"GPU {array.device.id}" if isinstance(kind_of(array), CupyKind) else "the host"
