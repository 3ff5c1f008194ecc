"""The announcement of an array: its dtype and shape, followed by the array itself where it is small.

It is the first message of an operation whose size only one rank knows. Layout, little-endian: dtype (1 byte), number of
dimensions (1 byte), 6 zero bytes, each dimension (8 bytes), zeros up to a multiple of 16; then all of the array's bytes or
none.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np

from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import ALIGNMENT_BYTES, DIMENSION_MAX, NDIM_MAX, TOTAL_BYTES_MAX

INLINE_BYTES: Final = 64 << 10
"""Arrays of up to this size are sent with their announcement."""

_OPENING: Final = struct.Struct("<BB6x")
_DIMENSION_BYTES: Final = 8
_CODES: Final = frozenset(int(dtype) for dtype in DType)

Array = np.ndarray[Any, Any]


def size_bytes(spec: TensorSpec) -> int:
    """Size of an array's announcement."""
    total = spec.nbytes
    return _start(len(spec.shape)) + (total if total <= INLINE_BYTES else 0)


def pack(spec: TensorSpec, data: Array) -> Array:
    """The announcement of an array (C-contiguous, in its storage dtype), as uint8.

    Raises:
        CodecError: it has more dimensions than any receiver accepts.
    """
    if len(spec.shape) > NDIM_MAX:
        raise CodecError(f"an array of {len(spec.shape)} dimensions is too long to send; at most {NDIM_MAX} are allowed")
    head = _OPENING.pack(spec.dtype, len(spec.shape)) + struct.pack(f"<{len(spec.shape)}Q", *spec.shape)
    start = _start(len(spec.shape))
    announcement = np.zeros(size_bytes(spec), np.uint8)
    announcement[: len(head)] = np.frombuffer(head, np.uint8)
    if announcement.size > start:
        announcement[start:] = data.reshape(-1).view(np.uint8)
    return announcement


def unpack(announcement: Array) -> tuple[TensorSpec, Array | None]:
    """The announced spec, and the array (a view of the bytes, in its storage dtype and shape) if it was sent with it.

    Raises:
        CodecError: the bytes are no announcement.
    """
    head = announcement[: _start(NDIM_MAX)].tobytes()
    if len(head) < _OPENING.size:
        raise CodecError(f"an announcement of {announcement.size} bytes is too short to be one")
    code, ndim = _OPENING.unpack_from(head)
    start = _start(ndim)
    if code not in _CODES or ndim > NDIM_MAX or announcement.size < start:
        raise CodecError(f"an announcement of {announcement.size} bytes announces {ndim} dimensions of dtype {code}")
    shape: tuple[int, ...] = struct.unpack_from(f"<{ndim}Q", head, _OPENING.size)
    spec = TensorSpec(DType(code), shape)
    total = spec.nbytes
    if max(shape, default=0) >= DIMENSION_MAX or total > TOTAL_BYTES_MAX or announcement.size - start not in (0, total):
        raise CodecError(f"an announcement of {announcement.size} bytes announces {spec}")
    if announcement.size - start < total:
        return spec, None
    return spec, announcement[start:].view(spec.dtype.storage).reshape(shape)


def _start(ndim: int) -> int:
    """Where the array begins."""
    return -(-(_OPENING.size + ndim * _DIMENSION_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
