"""Messages between stages: one array of bytes that says what it is and holds one array, several, or none.

    length of header | header: which step and wire, dtype and shape of each array | array | array ...

Shapes may therefore differ from microbatch to microbatch, and a message of another step is found out at once. The bytes are a
copy: the stage may use its arrays again as soon as the message is made.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.base import Kind
from ferrorpc.arrays.kinds import NUMPY, view
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec

ALIGNMENT: Final = 64
"""Arrays begin at multiples of so many bytes, as vector instructions like it."""
_LENGTH: Final = np.dtype("<u4")

Array = np.ndarray[Any, Any]


class Letter(NamedTuple):
    """What a message is about: the pipeline it belongs to, the step, and its wire."""

    pipeline: str
    step: int
    wire: str


def pack(letter: Letter, value: Any) -> Array:
    """The message's bytes.

    Args:
        value: an array, None, or a tuple of these.

    Raises:
        TensorMismatchError: an array's dtype cannot be sent.
    """
    items = value if isinstance(value, tuple) else (value,)
    views = [None if item is None else view(item) for item in items]
    parts = [None if each is None else [int(each.spec.dtype), list(each.spec.shape)] for each in views]
    header = json.dumps([*letter, isinstance(value, tuple), parts], separators=(",", ":")).encode()
    starts, total = _places(_LENGTH.itemsize + len(header), [0 if each is None else each.data.nbytes for each in views])
    message = np.zeros(total, np.uint8) if total < ALIGNMENT * 4 else np.empty(total, np.uint8)
    message[: _LENGTH.itemsize] = np.frombuffer(np.array(len(header), _LENGTH).tobytes(), np.uint8)
    message[_LENGTH.itemsize : _LENGTH.itemsize + len(header)] = np.frombuffer(header, np.uint8)
    for start, each in zip(starts, views, strict=True):
        if each is not None:
            message[start : start + each.data.nbytes] = each.data.reshape(-1).view(np.uint8)
    return message


def unpack(message: Array, kind: Kind) -> tuple[Letter, Any]:
    """What a message is about, and its value with arrays of this kind. NumPy arrays share the message's memory.

    Raises:
        CodecError: it is no such message.
    """
    try:
        length = int(message[: _LENGTH.itemsize].view(_LENGTH)[0])
        header = bytes(message[_LENGTH.itemsize : _LENGTH.itemsize + length])
        pipeline, step, wire, several, parts = json.loads(header)
        specs = [None if part is None else TensorSpec(DType(part[0]), tuple(part[1])) for part in parts]
        sizes = [0 if spec is None else math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
        starts, total = _places(_LENGTH.itemsize + length, sizes)
        if total != message.size:
            raise ValueError(f"{message.size} bytes where {total} are announced")
    except (ValueError, TypeError, IndexError) as problem:
        raise CodecError(f"a message between stages of {message.size} bytes is none: {problem}") from None
    values = [
        None if spec is None else _array(message[start : start + size], spec, kind)
        for spec, start, size in zip(specs, starts, sizes, strict=True)
    ]
    return Letter(pipeline, step, wire), tuple(values) if several else values[0]


def _array(raw: Array, spec: TensorSpec, kind: Kind) -> Any:
    data = raw.view(spec.dtype.storage).reshape(spec.shape)
    return data if kind is NUMPY and spec.dtype is not DType.BFLOAT16 else kind.wrap(data, spec)


def _places(position: int, sizes: list[int]) -> tuple[list[int], int]:
    """Where each array begins after `position`, and where the last one ends."""
    starts = []
    for size in sizes:
        position += -position % ALIGNMENT
        starts.append(position)
        position += size
    return starts, position
