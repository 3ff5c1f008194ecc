"""The text of the CUDA kernels, their names, and how it is to be compiled."""

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
    """The text of a program: this file, after what all of them need."""
    return "".join(Path(__file__).with_name(each).read_text(encoding="utf-8") for each in ("numbers.cu", name))
