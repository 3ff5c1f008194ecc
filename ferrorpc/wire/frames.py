"""Tensor frames: one chunk of one message of one operation, and its bytes on the wire.

The bytes are those of `DataMessage{frame: TensorFrame}` in protos/ferrorpc/v1, and any protobuf library reads and writes them.
They are encoded by hand because generated code copies a bytes field four or five times, and this code copies it once. From call
to call only the payload, the operation's number and the chunk's offset change. The rest is laid out once (`_skeleton`), with
every fixed-width field present. Padding puts the payload at a multiple of 16 bytes from the start of the message,
because sums over unaligned arrays take twice as long.

`scan` parses a frame from untrusted bytes. It allocates nothing whose size the bytes could choose, and checks everything: the
dtype is in the closed list, the byte count of the shape (in Python integers, which do not wrap) equals `total`, and the chunk
lies within it. Therefore the message of a compressed array describes its encoded bytes: dtype uint8, shape (encoded bytes,).
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec

NDIM_MAX: Final = 32
DIMENSION_MAX: Final = 1 << 40
TOTAL_BYTES_MAX: Final = 1 << 48
SIGNATURE_BYTES_MAX: Final = 16 << 10
ALIGNMENT_BYTES: Final = 16

_CACHED_SKELETONS: Final = 4096
_CACHED_HEADERS: Final = 512
_CACHED_LAYOUTS: Final = 256
"""Times SIGNATURE_BYTES_MAX, these limit the memory that a misbehaving peer can make the caches take."""

_FIELD_MAX: Final = (1 << 29) - 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FRAME: Final = 4 << 3 | _BYTES
"""The tag of DataMessage.frame: the first byte of every message that is encoded here."""

_OTHER_BODIES: Final = (1, 2, 3)
_GROUP, _STREAM, _NUMBER, _SLOT, _OFFSET, _TOTAL, _SIGNATURE, _DTYPE, _SHAPE = range(1, 10)
_PAD, _PAYLOAD = 14, 15
_WIRE_TYPES: Final = {
    _GROUP: _FIXED64,
    _STREAM: _FIXED32,
    _NUMBER: _FIXED64,
    _SLOT: _FIXED64,
    _OFFSET: _FIXED64,
    _TOTAL: _FIXED64,
    _SIGNATURE: _BYTES,
    _DTYPE: _VARINT,
    _PAD: _BYTES,
    _PAYLOAD: _BYTES,
}
"""Without shape, because repeated integers may be packed or not."""
_NUMBERS: Final = dict(enumerate(("group", "stream", "number", "slot", "offset", "total"), _GROUP))
"""The attributes of `_Fields` for fields of a fixed width."""

_FIXED: Final = struct.Struct("<BQBIBQBQBQBQ")
"""Fields 1 to 6 as ferrorpc writes them: tag, value, tag, value, ..."""
_FIXED_TAGS: Final = tuple(field << 3 | _WIRE_TYPES[field] for field in range(_GROUP, _TOTAL + 1))
_U64: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")
_Bytes: TypeAlias = bytes | memoryview


POINT_TO_POINT: Final = 0xFFFFFFFF
"""The stream number of send and recv. Stream 0 is program order; DDP, synchronisers and pipelines count up from 1."""
BARRIER_STREAM: Final = 0xFFFFFFFE
"""The stream of `Backend.barrier`, apart from the operations that a ProcessGroup numbers."""
BESIDE: Final = 0x4000_0000
"""Added to an operation's stream for the messages that ranks exchange before it, where it has no description of the arrays."""
ANNOUNCEMENT_SLOT: Final = 0xFFFF
"""The slot of a broadcast's announcement, greater than those of every plan."""


class Key(NamedTuple):
    """Names one operation of a generation. Frames of other generations never get here: their stream is refused."""

    group: int
    stream: int
    number: int


class Header(NamedTuple):
    """What all chunks of one message have in common. Built once per prepared call and slot, and used for every number."""

    slot: int
    """Which message of the operation it is: the plan's label, or the tag of send and recv."""
    signature: str
    dtype: DType
    shape: tuple[int, ...]
    total: int
    """Bytes of the whole message: the product of the shape times the dtype's itemsize."""

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the message."""
        return TensorSpec(self.dtype, self.shape)


class Frame:
    """One chunk as it arrived. `payload` is a read-only view of the received bytes."""

    __slots__ = ("header", "key", "offset", "payload", "source")

    def __init__(self, key: Key, source: int, header: Header, offset: int, payload: memoryview) -> None:
        self.key = key
        self.source = source
        self.header = header
        self.offset = offset
        self.payload = payload


@lru_cache(_CACHED_SKELETONS)
def _skeleton(group: int, stream: int, header: Header, size_bytes: int) -> tuple[bytes, bytes, bytes]:
    """What all chunks of a message that have `size_bytes` have in common: the bytes before the number, between number and
    offset, and between offset and payload.

    Raises:
        CodecError: the signature or the shape is larger than any receiver accepts.
    """
    if len(header.signature.encode()) > SIGNATURE_BYTES_MAX or len(header.shape) > NDIM_MAX:
        raise CodecError(
            f"a signature of {len(header.signature)} characters with {len(header.shape)} dimensions is too long to send",
            hint=f"signatures have at most {SIGNATURE_BYTES_MAX} bytes, arrays at most {NDIM_MAX} dimensions",
        )
    described = _description(header)
    length = _FIXED.size + len(described)
    tail = _payload_tag(length, size_bytes)
    one, two, three, four, five, six = (bytes([tag]) for tag in _FIXED_TAGS)
    frame_tag = bytes([_FRAME]) + _varint(length + len(tail) + size_bytes)
    before_number = frame_tag + one + _U64.pack(group) + two + _U32.pack(stream) + three
    after_number = four + _U64.pack(header.slot) + five
    return before_number, after_number, six + _U64.pack(header.total) + described + tail


def encode(key: Key, header: Header, offset: int, payload: _Bytes) -> bytes:
    """One chunk as a message. `payload` is any contiguous buffer of bytes, empty for an empty message; it is copied once."""
    return b"".join((frame_prefix(key, header, offset, len(payload)), payload))


def frame_prefix(key: Key, header: Header, offset: int, size_bytes: int) -> bytes:
    """What `encode` puts before a payload of `size_bytes`, for callers that copy the payload themselves."""
    before_number, after_number, before_payload = _skeleton(key.group, key.stream, header, size_bytes)
    return b"".join((before_number, _U64.pack(key.number), after_number, _U64.pack(offset), before_payload))


def is_frame(message: _Bytes) -> bool:
    """Whether these bytes begin like a frame that `scan` reads. Others are parsed by the generated DataMessage."""
    return len(message) > 0 and message[0] == _FRAME


def scan(message: _Bytes, source: int) -> Frame:
    """Parses the frame in these bytes, which came from rank `source`. Its payload is a view of them.

    Fields may come in any order and unknown ones are skipped, as usual in protobuf.

    Raises:
        CodecError: the bytes are not exactly one valid frame.
    """
    known = _layouts.get(len(message))
    frame = None if known is None else known.scan(message, source)
    if frame is not None:
        return frame
    try:
        start, fields, header = _read(message)
    except (IndexError, struct.error):
        raise CodecError(f"a message of {len(message)} bytes from rank {source} ends in the middle of a field") from None
    except CodecError as error:
        raise CodecError(f"rank {source} sent what is no frame: {error.message}") from None
    first, last = fields.payload
    if fields.described and first < last == len(message) and first <= SIGNATURE_BYTES_MAX:
        if len(_layouts) >= _CACHED_LAYOUTS:
            _layouts.clear()
        _layouts[len(message)] = _Layout(message, start, fields.described, first, header)
    key = Key(fields.group, fields.stream, fields.number)
    return Frame(key, source, header, fields.offset, memoryview(message)[first:last].toreadonly())


def _read(message: _Bytes) -> tuple[int, _Fields, Header]:
    """Where the frame begins, its fields, and its header. IndexError or struct.error where the bytes end early."""
    start, end = _frame_in(message)
    fields = _Fields(message, start, end)
    header = _header(fields.slot, fields.signature, fields.dtype, fields.shape, fields.total)
    first, last = fields.payload
    if last - first > header.total - fields.offset or (first == last) != (header.total == 0):
        raise CodecError(
            f"a chunk of {last - first} bytes at byte {fields.offset} does not lie in a message of {header.total} bytes"
        )
    return start, fields, header


class _Layout:
    """The last message of some length, without number and offset. A message with the same layout is not parsed again."""

    __slots__ = ("_description", "_first", "_frame_tag", "_header", "_start", "_where")

    def __init__(self, message: _Bytes, start: int, where: int, first: int, header: Header) -> None:
        self._start = start
        self._where = where
        self._first = first
        self._header = header
        self._frame_tag = bytes(message[:start])
        self._description = bytes(message[where:first])

    def scan(self, message: _Bytes, source: int) -> Frame | None:
        """The frame in a message of this length; None where it has to be parsed field by field."""
        first, header = self._first, self._header
        if message[self._where : first] != self._description or message[: self._start] != self._frame_tag:
            return None
        one, group, two, stream, three, number, four, slot, five, offset, six, total = _FIXED.unpack_from(message, self._start)
        if (one, two, three, four, five, six, slot, total) != (*_FIXED_TAGS, header.slot, header.total):
            return None
        if len(message) - first > total - offset:
            return None
        return Frame(Key(group, stream, number), source, header, offset, memoryview(message)[first:].toreadonly())


_layouts: Final[dict[int, _Layout]] = {}


class _Fields:
    """The fields of one TensorFrame as they are in the bytes, not checked against each other yet."""

    __slots__ = ("described", "dtype", "group", "number", "offset", "payload", "shape", "signature", "slot", "stream", "total")

    def __init__(self, message: _Bytes, position: int, end: int) -> None:
        self.group = self.stream = self.number = self.slot = self.offset = self.total = 0
        self.signature = b""
        self.dtype = 0
        self.shape: tuple[int, ...] = ()
        self.payload = (end, end)
        self.described = 0
        """Where the fields after 6 begin, if fields 1 to 6 are only at the front as ferrorpc writes them; else 0."""
        position = self._fixed(message, position, end)
        while position < end:
            position = self._field(message, position, end)
        if position != end:
            raise CodecError("the last field of a frame is longer than the frame")

    def _fixed(self, message: _Bytes, position: int, end: int) -> int:
        """Reads fields 1 to 6 at once if they are as ferrorpc writes them. Returns the position after them, else the same."""
        if end - position < _FIXED.size:
            return position
        first, group, second, stream, third, number, fourth, slot, fifth, offset, sixth, total = _FIXED.unpack_from(
            message, position
        )
        if (first, second, third, fourth, fifth, sixth) != _FIXED_TAGS:
            return position
        self.group, self.stream, self.number, self.slot, self.offset, self.total = group, stream, number, slot, offset, total
        self.described = position + _FIXED.size
        return self.described

    def _field(self, message: _Bytes, position: int, end: int) -> int:
        tag, position = _read_varint(message, position)
        field, wire_type = tag >> 3, tag & 7
        if field == _SHAPE:
            return self._dimensions(message, position, end, wire_type)
        expected = _WIRE_TYPES.get(field)
        if expected is None:
            return _skip(message, position, field, wire_type)
        if wire_type != expected:
            raise CodecError(f"field {field} of a frame has wire type {wire_type} instead of {expected}")
        if wire_type == _BYTES:
            first, last = _extent(message, position, end)
            self._text(message, field, first, last)
            return last
        if wire_type == _VARINT:
            self.dtype, position = _read_varint(message, position)
            return position
        return self._number(message, field, position)

    def _text(self, message: _Bytes, field: int, first: int, last: int) -> None:
        if field == _PAYLOAD:
            self.payload = first, last
        elif field == _SIGNATURE:
            if last - first > SIGNATURE_BYTES_MAX:
                raise CodecError(f"a signature of {last - first} bytes; at most {SIGNATURE_BYTES_MAX} are allowed")
            self.signature = bytes(message[first:last])

    def _number(self, message: _Bytes, field: int, position: int) -> int:
        self.described = 0
        fixed = _U32 if field == _STREAM else _U64
        setattr(self, _NUMBERS[field], *fixed.unpack_from(message, position))
        return position + fixed.size

    def _dimensions(self, message: _Bytes, position: int, end: int, wire_type: int) -> int:
        """Reads dimensions, packed or one by one."""
        if wire_type == _BYTES:
            position, last = _extent(message, position, end)
        elif wire_type == _VARINT:
            last = position + 1
        else:
            raise CodecError(f"the shape of a frame has wire type {wire_type}")
        dimensions = list(self.shape)
        while position < last:
            value, position = _read_varint(message, position)
            dimensions.append(value)
            if len(dimensions) > NDIM_MAX:
                raise CodecError(f"an array has at most {NDIM_MAX} dimensions")
        if wire_type == _BYTES and position != last:
            raise CodecError("the shape of a frame ends in the middle of a dimension")
        self.shape = tuple(dimensions)
        return position


@lru_cache(_CACHED_HEADERS)
def _header(slot: int, signature: bytes, dtype_number: int, shape: tuple[int, ...], total: int) -> Header:
    """The header. Raises CodecError unless dtype, shape and size agree with each other."""
    if not DType.BOOL <= dtype_number <= DType.COMPLEX128:
        raise CodecError(f"{dtype_number} is the number of no dtype")
    dtype = DType(dtype_number)
    if any(dimension >= DIMENSION_MAX for dimension in shape):
        raise CodecError(f"shape {shape} has a dimension of 2**40 or more")
    if total > TOTAL_BYTES_MAX or math.prod(shape) * dtype.itemsize != total:
        raise CodecError(f"{dtype.label} of shape {shape} does not have {total} bytes")
    try:
        return Header(slot, signature.decode(), dtype, shape, total)
    except UnicodeDecodeError:
        raise CodecError("the signature of a frame is not UTF-8") from None


def _frame_in(message: _Bytes) -> tuple[int, int]:
    """Where the one TensorFrame of a DataMessage begins and ends."""
    found: tuple[int, int] | None = None
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        field, wire_type = tag >> 3, tag & 7
        if tag == _FRAME:
            if found is not None:
                raise CodecError("two frames in one message")
            found = _extent(message, position, len(message))
            position = found[1]
        elif field in _OTHER_BODIES or field == _FRAME >> 3:
            raise CodecError(f"a frame together with field {field} of wire type {wire_type} in one message")
        else:
            position = _skip(message, position, field, wire_type)
    if found is None or position != len(message):
        raise CodecError(f"a message of {len(message)} bytes holds no whole frame")
    return found


def _skip(message: _Bytes, position: int, field: int, wire_type: int) -> int:
    """The end of an unknown field. Groups, which are deprecated in protobuf, are refused."""
    if not 1 <= field <= _FIELD_MAX:
        raise CodecError(f"there is no field number {field}")
    if wire_type == _VARINT:
        return _read_varint(message, position)[1]
    if wire_type == _BYTES:
        return _extent(message, position, len(message))[1]
    if wire_type == _FIXED64:
        return position + 8
    if wire_type == _FIXED32:
        return position + 4
    raise CodecError(f"field {field} has the unknown wire type {wire_type}")


def _extent(message: _Bytes, position: int, end: int) -> tuple[int, int]:
    """First and last position of a field that begins with its length."""
    length, first = _read_varint(message, position)
    if length > end - first:
        raise CodecError(f"a field of {length} bytes in the {end - first} bytes that are left")
    return first, first + length


def _read_varint(message: _Bytes, position: int) -> tuple[int, int]:
    """An unsigned integer of at most ten bytes, and the position after it. IndexError at the end of the bytes."""
    byte = message[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift = byte & 0x7F, 7
    while True:
        position += 1
        byte = message[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise CodecError("an integer of more than ten bytes")
    return value, position + 1


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _description(header: Header) -> bytes:
    """Signature, dtype and shape."""
    signature = header.signature.encode()
    dimensions = b"".join(_varint(dimension) for dimension in header.shape)
    parts = [_varint(_SIGNATURE << 3 | _BYTES), _varint(len(signature)), signature]
    parts += [_varint(_DTYPE << 3 | _VARINT), _varint(header.dtype)]
    if dimensions:
        parts += [_varint(_SHAPE << 3 | _BYTES), _varint(len(dimensions)), dimensions]
    return b"".join(parts)


def _payload_tag(length: int, size_bytes: int) -> bytes:
    """The bytes between the description and the payload: padding where it is needed, then tag and length of the payload.

    `length` is that of the fields before it. Padding can make the frame's own length field a byte longer, so paddings are tried
    until one fits. An empty payload is left out.
    """
    if size_bytes == 0:
        return b""
    tag = _varint(_PAYLOAD << 3 | _BYTES) + _varint(size_bytes)
    fillers = [b""] + [_varint(_PAD << 3 | _BYTES) + _varint(count) + bytes(count) for count in range(1, 2 * ALIGNMENT_BYTES)]
    for filler in fillers:
        body = length + len(filler) + len(tag)
        frame_tag = 1 + len(_varint(body + size_bytes))
        if (frame_tag + body) % ALIGNMENT_BYTES == 0:
            return filler + tag
    raise AssertionError("no padding aligns the payload")
