"""The text of the CUDA kernels, their names, and how to compile it with NVRTC, which needs no GPU."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ferrorpc.errors import BackendUnavailableError
from ferrorpc.kernels.cuda.reference import NAMES

OPTIONS: Final = ("--std=c++17",)
_PAIRS: Final = [f"{of}_{to}" for of, to in itertools.product(NAMES.values(), NAMES.values())]
KERNELS: Final = (
    *(f"pack_{pair}" for pair in _PAIRS),
    *(f"unpack_{pair}" for pair in _PAIRS),
    "quantise_int8",
    "dequantise_int8",
    *(f"sum_peers_{name}" for name in NAMES.values()),
    "residue",
    "forget",
)


def source() -> str:
    """The text."""
    return Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")


def compiled(architecture: str, options: Sequence[str] = OPTIONS) -> bytes:
    """A cubin for an architecture such as "sm_90".

    Raises:
        BackendUnavailableError: there is no NVRTC, or it refuses the text; its words are in the reason.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        error, program = nvrtc.nvrtcCreateProgram(source().encode(), b"kernels.cu", 0, [], [])
    except Exception as problem:  # noqa: BLE001  the package loads its library when first called, and fails in its own ways
        hint = "pip install cuda-bindings nvidia-cuda-nvrtc-cu12"
        raise BackendUnavailableError(f"NVRTC cannot be used: {type(problem).__name__}: {problem}", hint) from None
    _check(nvrtc, error)
    given = [option.encode() for option in (f"--gpu-architecture={architecture}", *options)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    if int(error):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BackendUnavailableError(f"NVRTC refuses the kernels for {architecture}: {log.decode(errors='replace')}")
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(nvrtc, error)
    image = bytearray(size)
    _check(nvrtc, *nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(image)


def _check(nvrtc: Any, error: Any) -> None:
    if int(error):
        raise BackendUnavailableError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
