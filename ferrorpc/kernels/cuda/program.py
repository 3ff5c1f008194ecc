"""The source of the CUDA kernels, their names and how they are compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

from ferrorpc.types import DType

OPTIONS: Final = ("--std=c++17",)
NAMES: Final = {DType.FLOAT32: "f32", DType.FLOAT16: "f16", DType.BFLOAT16: "bf16"}
"""The names of dtypes in kernel names."""
PAIRS: Final = tuple((of, to) for of, to in itertools.product(NAMES, NAMES) if of is to or DType.FLOAT32 in (of, to))
"""The dtypes of what is packed or unpacked and of where it goes. No array of one half type goes into one of the other."""
KERNELS: Final = (
    *(f"{verb}_{NAMES[of]}_{NAMES[to]}" for verb in ("pack", "unpack") for of, to in PAIRS),
    "quantise_int8",
    "dequantise_int8",
    *(f"sum_peers_{name}" for name in NAMES.values()),
    "residue",
    "forget",
)


def source(name: str = "kernels.cu") -> str:
    """The source of a program: the given file after numbers.cu, which every program needs."""
    return "".join((files(__package__) / each).read_text(encoding="utf-8") for each in ("numbers.cu", name))


def compiled(cupy: Any, name: str = "kernels.cu") -> Callable[[str], Any]:
    """Compiles a program with the module `cupy`. Returns a function that finds its kernels by their names."""
    module = cupy.RawModule(code=source(name), options=OPTIONS)
    module.compile()
    return functools.cache(module.get_function)
