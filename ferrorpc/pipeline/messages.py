"""The encoding of messages between stages: bytes that hold one array, several, or none, and say what they are.

    array | array ... | dtype and shape of each array, transfer, step, pipeline | length of what follows the arrays

So shapes may differ between microbatches, and a message of another step is detected at once. The bytes are a copy: a stage may
write to its arrays as soon as the message is made. The description of arrays is encoded and parsed once for each layout.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.device import is_host
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import on_one_device, packed_bytes, view
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec

ALIGNMENT: Final = 64
"""Arrays begin at multiples of so many bytes, for vector instructions."""
_LENGTH_BYTES: Final = 4
_LAYOUTS: Final = 256
"""How many layouts are cached."""
_LAYOUT_BYTES_MAX: Final = 4096
"""Layouts whose text is longer are not cached."""

Array = np.ndarray[Any, Any]


class Envelope(NamedTuple):
    """What a message belongs to: a pipeline, a step, and a transfer."""

    pipeline: str
    step: int
    transfer: str


class _Layout:
    """Which arrays a value consists of, and where they are in the message.

    Args:
        is_tuple: whether the value is a tuple.
        specs: of its arrays; None for None.
    """

    __slots__ = ("end", "is_tuple", "places", "specs", "text")

    def __init__(self, is_tuple: bool, specs: tuple[TensorSpec | None, ...]) -> None:
        self.is_tuple = is_tuple
        self.specs = specs
        parts = [None if spec is None else [int(spec.dtype), list(spec.shape)] for spec in specs]
        self.text = json.dumps([is_tuple, parts], separators=(",", ":")).encode()
        self.places: list[slice] = []
        self.end = 0
        for spec in specs:
            start = self.end + -self.end % ALIGNMENT
            self.end = start + (0 if spec is None else spec.nbytes)
            self.places.append(slice(start, self.end))


_layout = lru_cache(_LAYOUTS)(_Layout)


def _parse(text: bytes) -> _Layout:
    """The layout of this text. Raises ValueError or TypeError if it is not one."""
    is_tuple, parts = json.loads(text)
    return _Layout(is_tuple, tuple([None if part is None else TensorSpec(DType(part[0]), tuple(part[1])) for part in parts]))


_parse_cached = lru_cache(_LAYOUTS)(_parse)


class Message(NamedTuple):
    """A message as it was received."""

    envelope: Envelope
    layout: _Layout
    data: Array | None
    """The arrays' bytes; None where they are sent separately."""

    @property
    def payload(self) -> Array:
        """The arrays' bytes, of a message that must contain them. Raises CodecError if it does not."""
        if self.data is None:
            raise CodecError(
                f"a message between stages, of {self.envelope.transfer}, lacks its {self.layout.end} bytes of arrays"
            )
        return self.data

    def value(self, data: Any, kind: Kind) -> Any:
        """The value, with arrays of this kind.

        Args:
            data: the arrays' bytes. Where they and arrays of this kind are on the host, the value shares their memory.
        """
        values = [
            None if spec is None else _array(data[place], spec, kind)
            for spec, place in zip(self.layout.specs, self.layout.places, strict=True)
        ]
        return tuple(values) if self.layout.is_tuple else values[0]


def pack(envelope: Envelope, value: Any) -> Any:
    """The message's bytes; on a GPU where all of its arrays are there, so that the transport takes them from the GPU.

    Args:
        value: an array, None, or a tuple of these.

    Raises:
        UsageError: it is something else, or an array's dtype cannot be sent. It names the transfer.
    """
    layout, parts = _parts(value, envelope)
    return packed_bytes(parts, layout.end, _description(envelope, layout))


def pack_split(envelope: Envelope, value: Any) -> tuple[Any, Any]:
    """As `pack`, in two: the message without the arrays' bytes, and these. Unless all are on one GPU: the message, and None."""
    layout, parts = _parts(value, envelope)
    description = _description(envelope, layout)
    if not layout.end or not on_one_device([part for _, part in parts]):
        return packed_bytes(parts, layout.end, description), None
    return description, packed_bytes(parts, layout.end)


def _parts(value: Any, envelope: Envelope) -> tuple[_Layout, list[tuple[slice, View]]]:
    is_tuple = isinstance(value, tuple)
    with ErrorPrefix(f"the value of {envelope.transfer}"):
        views = [None if item is None else view(item, on_device=True) for item in (value if is_tuple else (value,))]
    layout = _layout(is_tuple, tuple([None if each is None else each.spec for each in views]))
    return layout, [(place, each) for place, each in zip(layout.places, views, strict=True) if each is not None]


def _description(envelope: Envelope, layout: _Layout) -> Array:
    text = b"\0".join((layout.text, envelope.transfer.encode(), b"%d" % envelope.step, envelope.pipeline.encode()))
    return np.frombuffer(text + len(text).to_bytes(_LENGTH_BYTES, "little"), np.uint8)


def parse(message: Array) -> Message:
    """Reads a message. Raises CodecError if the bytes are not one."""
    try:
        last = message.size - _LENGTH_BYTES
        length = int.from_bytes(message[max(last, 0) :].tobytes(), "little")
        text, transfer, step, pipeline = message[max(last - length, 0) : last].tobytes().split(b"\0")
        layout = (_parse_cached if len(text) <= _LAYOUT_BYTES_MAX else _parse)(text)
        if last - length not in (0, layout.end):
            raise ValueError(f"{message.size} bytes where {layout.end + length + _LENGTH_BYTES} are announced")
        envelope = Envelope(pipeline.decode(), int(step), transfer.decode())
    except (ValueError, TypeError, IndexError, RecursionError) as problem:
        raise CodecError(f"a message between stages of {message.size} bytes is malformed: {problem}") from None
    return Message(envelope, layout, message if last - length == layout.end else None)


def _array(raw: Any, spec: TensorSpec, kind: Kind) -> Any:
    data = raw.view(spec.dtype.storage).reshape(spec.shape)
    shared = kind.alias(data, spec) if is_host(data) else None
    return kind.wrap(data, spec) if shared is None else shared
