"""The source of the CUDA kernels, their names and their compiler options."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

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


def source(name: str = "kernels.cu") -> str:
    """The source of a program: the given file after numbers.cu, which every program needs."""
    return "".join(Path(__file__).with_name(each).read_text(encoding="utf-8") for each in ("numbers.cu", name))
