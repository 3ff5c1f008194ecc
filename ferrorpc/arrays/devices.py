"""The GPUs of this process, each opened once. CuPy is imported only when one is opened by its number."""

from __future__ import annotations

import importlib
from typing import Any, Final

from ferrorpc.arrays.device import Device
from ferrorpc.arrays.staging import Staging
from ferrorpc.errors import BackendUnavailableError

INSTALL: Final = "pip install 'ferrorpc[gpu]' (CUDA 12) or 'ferrorpc[gpu-cuda13]' (CUDA 13)"
_devices: dict[tuple[Any, int], Device] = {}


def device_of(cupy: Any, index: int) -> Device:
    """The device with this number; the same object each time."""
    key = cupy, index
    return _devices.get(key) or _devices.setdefault(key, Device(cupy, index, make_staging=Staging))


def forget(cupy: Any) -> None:
    """Forgets the devices of a CuPy module, such as a stand-in for it whose test is over."""
    for known in [known for known in list(_devices) if known[0] is cupy]:
        del _devices[known]


def open_device(index: int | None = None) -> Device:
    """The GPU with this number, or CuPy's current one.

    Raises:
        BackendUnavailableError: there is no CuPy, or no GPU that it can use; the hint is the command that installs it.
    """
    try:
        cupy = importlib.import_module("cupy")
    except Exception as problem:  # noqa: BLE001  one that does not fit what is installed beside it may raise anything
        raise BackendUnavailableError(f"GPU arrays need CuPy, which cannot be imported: {problem}", INSTALL) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as problem:  # noqa: BLE001  CuPy's own error class is not known before it is imported
        raise BackendUnavailableError(
            f"CuPy finds no GPU: {problem}", "start the process where a GPU and its driver are visible, or use backend='grpc'"
        ) from None
    chosen = int(cupy.cuda.Device().id) if index is None else index
    if not 0 <= chosen < count:
        raise BackendUnavailableError(
            f"there is no GPU {chosen}; CuPy sees {count}", "look at FERRORPC_DEVICE and CUDA_VISIBLE_DEVICES"
        )
    return device_of(cupy, chosen)
