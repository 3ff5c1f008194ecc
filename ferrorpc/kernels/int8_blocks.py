"""Arrays encoded as int8: blocks of 256 integers with one scale each; first all scales (float32), then all integers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

BLOCK_VALUES: Final = 256
"""Values that share one scale."""


def scales_and_integers(encoded: Any, count: int) -> tuple[Any, Any]:
    """The scales and the integers of `count` encoded values, as views of an array of bytes, also of one on a GPU."""
    scale_bytes = 4 * -(-count // BLOCK_VALUES)
    return encoded[:scale_bytes].view(np.float32), encoded[scale_bytes:].view(np.int8)
