"""Whether the program uses torch on GPUs, on which, and in which stream. torch is never imported here."""

from __future__ import annotations

import sys
from typing import Any


def uses_gpus() -> bool:
    """Whether the program has begun to use a GPU through torch."""
    is_initialized = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def chosen_in_torch() -> int | None:
    """The number of the GPU that torch was told to use; None where it is the first, which it uses without being told."""
    return (sys.modules["torch"].cuda.current_device() or None) if uses_gpus() else None


def current_of_torch(index: int) -> int:
    """The CUDA stream that is torch's current one on the GPU with this number; 0 for the null stream, and where torch is not
    used on GPUs."""
    if not uses_gpus():
        return 0
    torch: Any = sys.modules["torch"]
    # torch's own compiled code asks so, too: the public way makes an object, which costs more than a launch may.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index))
