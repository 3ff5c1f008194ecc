"""The messages that ranks exchange before operations whose sizes or order they do not all know.

A communicator's operations carry no description of the arrays. So moves, whose shapes only their owners know, begin with an
exchange of every rank's dtypes and shapes; and operations of streams begin with the number that rank 0 gave them. Both are
small messages on the group's host lanes, under a key next to that of the operation, and carry its signature, so that a mismatch
is found here. Reductions in program order need none.

Where only the root knows the arrays, only its announcement matters, and the root need not wait for any. But a launch that waits
on the GPU for the other ranks' launches keeps whatever synchronises this GPU waiting, perhaps in vain: the other rank may need
what this one does next. There all ranks announce nevertheless, so that each launches once all have come.

A message: number (8 bytes, -1 from ranks that give none), whether the arrays are on the host (1 byte), how many there are
(7 bytes), then for each dtype (1), dimensions (7) and each dimension (8); little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import BESIDE, DIMENSION_MAX, NDIM_MAX, Key

ROOT_DECIDES: Final = (Operation.BROADCAST, Operation.SCATTER)
"""Operations of which only the root knows the arrays: their dtypes and shapes, and whether they are on a GPU."""
DESCRIBED: Final = (*ROOT_DECIDES, Operation.GATHER, Operation.ALL_GATHER, Operation.ALL_TO_ALL)
"""Operations whose shapes only their owners know."""

_HEAD: Final = struct.Struct("<qQ")
_HOST: Final = 1 << 56

Array = np.ndarray[Any, Any]


class Announced(NamedTuple):
    """The announcement of one rank."""

    number: int
    on_host: bool
    specs: tuple[TensorSpec, ...]


def key_beside(key: Key) -> Key:
    """The key of an operation's announcement."""
    return Key(key.group, key.stream | BESIDE, key.number)


def pack(number: int, on_host: bool, specs: Sequence[TensorSpec]) -> Array:
    """Encodes an announcement, as uint8."""
    parts = [_HEAD.pack(number, len(specs) | on_host * _HOST)]
    parts += [struct.pack(f"<Q{len(s.shape)}Q", int(s.dtype) | len(s.shape) << 8, *s.shape) for s in specs]
    return np.frombuffer(b"".join(parts), np.uint8)


def unpack(message: Array) -> Announced:
    """Decodes an announcement.

    Raises:
        CodecError: the bytes are none.
    """
    words = np.frombuffer(message.tobytes(), "<u8").tolist() if message.size % 8 == 0 else []
    if len(words) < 2:
        raise CodecError(f"{message.size} bytes announce nothing")
    number = struct.unpack("<q", struct.pack("<Q", words[0]))[0]
    specs, place = [], 2
    for _ in range(words[1] % _HOST):
        code, ndim = (words[place] & 0xFF, words[place] >> 8) if place < len(words) else (0, 0)
        shape = tuple(words[place + 1 : place + 1 + ndim])
        known = code in DType._value2member_map_ and ndim <= NDIM_MAX
        if not known or len(shape) < ndim or max(shape, default=0) >= DIMENSION_MAX:
            raise CodecError(f"an announcement of {message.size} bytes describes {ndim} dimensions of dtype {code}")
        specs.append(TensorSpec(DType(code), shape))
        place += 1 + ndim
    if place < len(words):
        raise CodecError(f"an announcement of {message.size} bytes ends after {8 * place}")
    return Announced(number, bool(words[1] & _HOST), tuple(specs))


def announcing_call(speaker: int | None, message: Array | None, note: str) -> Call:
    """The operation of the host lanes that carries the announcements of a call.

    Args:
        speaker: the only rank that announces anything; None where all do.
        message: this rank's; None on a rank that only receives.
    """
    said = () if message is None else (TensorSpec(DType.UINT8, message.shape),)
    if speaker is None:
        return Call(Operation.ALL_GATHER, said, note=note, unordered=True)
    return Call(Operation.BROADCAST, said, root=speaker, note=note, unordered=True)
