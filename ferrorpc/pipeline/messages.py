"""Messages between stages: one array of bytes that says what it is and holds one array, several, or none.

    array | array ... | dtype and shape of each array | which step and wire | length of what follows the arrays

Shapes may therefore differ from microbatch to microbatch, and a message of another step is found out at once. The bytes are a
copy: the stage may use its arrays again as soon as the message is made. What describes arrays is spelled out, and read, once
for each form that messages have.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.device import is_host
from ferrorpc.arrays.kinds import laid_out, on_one_device, view
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec

ALIGNMENT: Final = 64
"""Arrays begin at multiples of so many bytes, as vector instructions like it."""
_LENGTH_BYTES: Final = 4
_FORMS: Final = 256
_FORM_BYTES_MAX: Final = 4096
"""Forms that are remembered, and how long their texts may be."""

Array = np.ndarray[Any, Any]


class Letter(NamedTuple):
    """What a message is about: the pipeline it belongs to, the step, and its wire."""

    pipeline: str
    step: int
    wire: str


class _Form:
    """What a value consists of, and where in the message its arrays lie.

    Args:
        several: whether it is a tuple.
        specs: of its arrays; None for None.
    """

    __slots__ = ("end", "places", "several", "specs", "text")

    def __init__(self, several: bool, specs: tuple[TensorSpec | None, ...]) -> None:
        self.several = several
        self.specs = specs
        parts = [None if spec is None else [int(spec.dtype), list(spec.shape)] for spec in specs]
        self.text = json.dumps([several, parts], separators=(",", ":")).encode()
        self.places: list[slice] = []
        self.end = 0
        for spec in specs:
            start = self.end + -self.end % ALIGNMENT
            self.end = start + (0 if spec is None else spec.nbytes)
            self.places.append(slice(start, self.end))


_form = lru_cache(_FORMS)(_Form)


def _read(text: bytes) -> _Form:
    """The form of this text. Raises ValueError or TypeError where it is none."""
    several, parts = json.loads(text)
    return _Form(several, tuple([None if part is None else TensorSpec(DType(part[0]), tuple(part[1])) for part in parts]))


_read_before = lru_cache(_FORMS)(_read)


class Message(NamedTuple):
    """What came."""

    letter: Letter
    form: _Form
    data: Array | None
    """The arrays' bytes; None where they come by another way."""

    @property
    def whole(self) -> Array:
        """The arrays' bytes, of a message that has to hold them. Raises CodecError."""
        if self.data is None:
            raise CodecError(f"a message between stages, of {self.letter.wire}, lacks its {self.form.end} bytes of arrays")
        return self.data

    def value(self, data: Any, kind: Kind) -> Any:
        """The value with arrays of this kind. Where these and `data` (the arrays' bytes) are on the host, they share memory."""
        values = [
            None if spec is None else _array(data[place], spec, kind)
            for spec, place in zip(self.form.specs, self.form.places, strict=True)
        ]
        return tuple(values) if self.form.several else values[0]


def pack(letter: Letter, value: Any) -> Any:
    """The message's bytes; on a GPU where all of its arrays are, for who sends it to take them from there.

    Args:
        value: an array, None, or a tuple of these.

    Raises:
        TensorMismatchError: an array's dtype cannot be sent.
    """
    form, parts = _parts(value)
    return laid_out(parts, form.end, _tail(letter, form))


def pack_apart(letter: Letter, value: Any) -> tuple[Any, Any]:
    """As `pack`, in two: a message without the arrays' bytes, and these. Unless all are on one GPU: the message, and None."""
    form, parts = _parts(value)
    tail = _tail(letter, form)
    if not form.end or not on_one_device([part for _, part in parts]):
        return laid_out(parts, form.end, tail), None
    return tail, laid_out(parts, form.end)


def _parts(value: Any) -> tuple[_Form, list[tuple[slice, View]]]:
    several = isinstance(value, tuple)
    views = [None if item is None else view(item, near=True) for item in (value if several else (value,))]
    form = _form(several, tuple([None if each is None else each.spec for each in views]))
    return form, [(place, each) for place, each in zip(form.places, views, strict=True) if each is not None]


def _tail(letter: Letter, form: _Form) -> Array:
    about = b"\0".join((form.text, letter.wire.encode(), b"%d" % letter.step, letter.pipeline.encode()))
    return np.frombuffer(about + len(about).to_bytes(_LENGTH_BYTES, "little"), np.uint8)


def read(message: Array) -> Message:
    """What a message is about, and holds. Raises CodecError: it is no such message."""
    try:
        last = message.size - _LENGTH_BYTES
        length = int.from_bytes(message[max(last, 0) :].tobytes(), "little")
        text, wire, step, pipeline = message[max(last - length, 0) : last].tobytes().split(b"\0")
        form = (_read_before if len(text) <= _FORM_BYTES_MAX else _read)(text)
        if last - length not in (0, form.end):
            raise ValueError(f"{message.size} bytes where {form.end + length + _LENGTH_BYTES} are announced")
        letter = Letter(pipeline.decode(), int(step), wire.decode())
    except (ValueError, TypeError, IndexError) as problem:
        raise CodecError(f"a message between stages of {message.size} bytes is none: {problem}") from None
    return Message(letter, form, message if last - length == form.end else None)


def unpack(message: Array, kind: Kind) -> tuple[Letter, Any]:
    """What a message is about, and its value with arrays of this kind, which share its memory where they are on the host.

    Raises:
        CodecError: it is no such message, or one without its arrays.
    """
    found = read(message)
    return found.letter, found.value(found.whole, kind)


def _array(raw: Any, spec: TensorSpec, kind: Kind) -> Any:
    data = raw.view(spec.dtype.storage).reshape(spec.shape)
    shared = kind.alias(data, spec) if is_host(data) else None
    return kind.wrap(data, spec) if shared is None else shared
