"""NVRTC: the CUDA kernels compiled for an architecture. It needs no GPU."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final

import pytest

from ferrorpc.kernels.cuda.program import OPTIONS, source

ARITHMETIC: Final = ("-ftz=true", "--fmad=false", "--prec-div=false")
"""Options with which a program may have its kernels compiled, each of which changes how floats are computed."""
_SECTION_HEADER: Final = struct.Struct("<IIQQQQ")
"""Of ELF64: name, type, flags, address, offset, size; more follows."""


@cache
def compiled(architecture: str, *more: str, text: str | None = None) -> bytes:
    """A cubin of the library's kernels, or of another text, for an architecture such as "sm_90". Seconds, the first time.

    Skips the test where there is no NVRTC, and fails it with NVRTC's words.
    """
    nvrtc = pytest.importorskip(
        "cuda.bindings.nvrtc", reason="there is no NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc-cu12"
    )
    try:
        error, program = nvrtc.nvrtcCreateProgram((source() if text is None else text).encode(), b"kernels.cu", 0, [], [])
    except Exception as problem:  # the package loads its library when first called, and fails in its own ways
        pytest.skip(f"NVRTC cannot be used: {type(problem).__name__}: {problem}")
    assert not int(error)
    given = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *more)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    log = _filled(nvrtc, program, "ProgramLog") if int(error) else b""
    assert not int(error), f"NVRTC refuses the kernels for {architecture}: {log.decode(errors='replace')}"
    image = _filled(nvrtc, program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return image


def machine_code(image: bytes) -> dict[str, bytes]:
    """The instructions of each kernel in a cubin, by section. What else it holds tells with which options it was made, too."""
    (table,) = struct.unpack_from("<Q", image, 40)
    entry, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [_SECTION_HEADER.unpack_from(image, table + entry * index) for index in range(count)]
    texts = headers[names][4]
    named = {image[texts + header[0] :].partition(b"\0")[0].decode(): header for header in headers}
    return {name: image[header[4] : header[4] + header[5]] for name, header in named.items() if name.startswith(".text.")}


def _filled(nvrtc: Any, program: Any, what: str) -> bytes:
    """What NVRTC writes into a buffer of the size that it asks for."""
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    assert not int(error)
    buffer = bytearray(size)
    (error,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    assert not int(error)
    return bytes(buffer)
