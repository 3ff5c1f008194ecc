"""Hand-made bytes are protobuf's bytes, and strange bytes are a CodecError that costs nothing."""

import random
import tracemalloc

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from ferrorpc.errors import CodecError
from ferrorpc.types import DType
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire import frames
from ferrorpc.wire.frames import (
    ALIGNMENT_BYTES,
    DIMENSION_MAX,
    NDIM_MAX,
    SIGNATURE_BYTES_MAX,
    TOTAL_BYTES_MAX,
    Header,
    Key,
    encode,
    is_frame,
    scan,
)

KEY = Key(1 << 63 | 5, 0xFFFFFFFF, 77)


def header_of(dtype: DType, shape: tuple[int, ...], *, slot: int = 9, signature: str = "all_reduce(op=sum)") -> Header:
    return Header(slot, signature, dtype, shape, int(np.prod(shape, dtype=object)) * dtype.itemsize)


def bytes_of(header: Header, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, header.total, dtype=np.uint8)


def generated(key: Key, header: Header, offset: int, payload: bytes, pad: bytes = b"") -> transport_pb2.DataMessage:
    message = transport_pb2.DataMessage()
    frame = message.frame
    frame.group, frame.stream, frame.number = key
    frame.slot, frame.offset, frame.total = header.slot, offset, header.total
    frame.signature, frame.dtype = header.signature, int(header.dtype)
    frame.shape.extend(header.shape)
    frame.pad, frame.payload = pad, payload
    return message


@pytest.mark.parametrize("dtype", list(DType))
def test_generated_code_reads_what_is_encoded_and_writes_the_same_bytes(dtype: DType) -> None:
    header = header_of(dtype, (3, 5))
    payload = bytes_of(header)
    offset = header.total - 2 * dtype.itemsize
    ours = encode(KEY, header, offset, payload[offset:])
    parsed = transport_pb2.DataMessage.FromString(ours)
    pad = parsed.frame.pad
    assert parsed == generated(KEY, header, offset, payload[offset:].tobytes(), pad)
    assert parsed.SerializeToString(deterministic=True) == ours
    assert set(pad) <= {0}


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (4, 0, 7), (1,) * NDIM_MAX])
def test_what_generated_code_writes_is_scanned(dtype: DType, shape: tuple[int, ...]) -> None:
    header = header_of(dtype, shape)
    payload = bytes_of(header).tobytes()
    frame = scan(generated(KEY, header, 0, payload).SerializeToString(), 3)
    assert (frame.key, frame.header, frame.offset, frame.source) == (KEY, header, 0, 3)
    assert bytes(frame.payload) == payload
    assert frame.header.dtype is dtype


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 100, 127, 128, 16_000, 16_383, 16_384, 100_000])
@pytest.mark.parametrize("length", range(0, 130, 7))
def test_a_frame_comes_back_and_its_payload_is_aligned_and_not_copied(size: int, length: int) -> None:
    header = Header(0, "s" * length, DType.UINT8, (size,), size)
    payload = bytes_of(header)
    message = encode(Key(0, 0, 0), header, 0, payload)
    assert is_frame(message)
    frame = scan(message, 0)
    assert (frame.key, frame.header, frame.offset) == (Key(0, 0, 0), header, 0)
    assert bytes(frame.payload) == payload.tobytes()
    assert frame.payload.readonly
    assert frame.payload.obj is message
    if size:
        assert (len(message) - size) % ALIGNMENT_BYTES == 0
        assert message.endswith(payload.tobytes())


def test_a_memoryview_is_scanned_like_bytes() -> None:
    header = header_of(DType.FLOAT32, (4,))
    message = bytearray(encode(KEY, header, 0, bytes_of(header)))
    for _ in range(2):  # read field by field, and as one that is laid out like the last
        frame = scan(memoryview(message), 1)
        assert bytes(frame.payload) == bytes_of(header).tobytes()
        assert frame.payload.readonly


def test_unknown_fields_unpacked_shapes_and_any_order_are_read_as_protobuf_reads_them() -> None:
    header = Header(0, "a", DType.UINT8, (2, 3), 6)
    body = b"\x7a\x06abcdef" + b"\x48\x02" + b"\xa0\x06\x07" + b"\x40\x06" + b"\x48\x03" + b"\x3a\x01a"
    body += b"\x31" + (6).to_bytes(8, "little") + b"\xaa\x06\x03xyz" + b"\xad\x06abcd" + b"\xa1\x06abcdefgh"
    message = b"\xa0\x06\x01" + b"\x22" + bytes([len(body)]) + body + b"\xaa\x06\x00"
    assert scan(message, 0).header == header
    parsed = transport_pb2.DataMessage.FromString(message).frame
    assert (list(parsed.shape), parsed.payload) == ([2, 3], b"abcdef")


def fields_of(header: Header, **changes: object) -> bytes:
    message = generated(Key(0, 0, 1), header, 0, bytes(header.total))
    for name, value in changes.items():
        if name == "shape":
            del message.frame.shape[:]
            message.frame.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(message.frame, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": 0},
        {"dtype": 16},
        {"dtype": -1},
        {"shape": [5]},
        {"shape": [2, 2, 0]},
        {"shape": [1 << 62, 4]},
        {"shape": [(1 << 64) - 1]},
        {"total": 17},
        {"total": (1 << 64) - 1},
        {"offset": 1},
        {"offset": 1 << 63},
        {"payload": b""},
        {"payload": bytes(17)},
        {"signature": "s" * (SIGNATURE_BYTES_MAX + 1)},
    ],
    ids=str,
)
def test_a_frame_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    header = header_of(DType.FLOAT32, (4,))
    assert scan(fields_of(header), 0).header == header
    with pytest.raises(CodecError):
        scan(fields_of(header, **changes), 0)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((1,) * (NDIM_MAX + 1), 1), ((DIMENSION_MAX,), 1), ((DIMENSION_MAX, 0), 0), ((TOTAL_BYTES_MAX >> 20, 2 << 20), 1)],
    ids=["dimensions", "dimension", "dimension of none", "total"],
)
def test_a_frame_past_a_limit_is_refused_though_it_is_of_one_piece(shape: tuple[int, ...], size: int) -> None:
    frames._layouts.clear()
    message = generated(KEY, header_of(DType.UINT8, shape), 0, bytes(size)).SerializeToString()
    with pytest.raises(CodecError, match=r"at most|2\*\*40|does not have"):
        scan(message, 0)


def test_strange_peers_cannot_make_this_process_remember_much() -> None:
    frames._layouts.clear()
    for size in range(1, frames._CACHED_LAYOUTS + 50):
        scan(encode(KEY, header_of(DType.UINT8, (size,)), 0, bytes(size)), 0)
    assert 0 < len(frames._layouts) <= frames._CACHED_LAYOUTS
    frames._layouts.clear()
    long = b"\xaa\x06\x80\x80\x02" + bytes(2 * SIGNATURE_BYTES_MAX)  # an unknown field before the frame
    scan(long + encode(KEY, header_of(DType.UINT8, (1,)), 0, b"x"), 0)
    assert not frames._layouts


def test_a_shape_whose_product_wraps_in_64_bits_is_refused() -> None:
    wrapping = Header(0, "", DType.FLOAT32, (1 << 31, 1 << 31, 4), 0)
    with pytest.raises(CodecError, match="does not have 0 bytes"):
        scan(fields_of(wrapping), 0)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x22",
        b"\x22\x05\x09",
        b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x22" + b"\xff" * 11,
        b"\x22\x02\x09\x00",
        b"\x22\x00\x22\x00",
        b"\x22\x00\x12\x00",
        b"\x20\x01",
        b"\x22\x01\x00",
        b"\x22\x02\x0b\x0c",
        b"\x22\x07\x3a\x01\xff\x40\x06\x48\x00",
        b"\x22\x06\x40\x06\x48\x00\x00\x07",
        b"\x22\x09\x40\x06\x48\x00\xa1\x06abc" + b"\xaa\x06\x03xyz",
    ],
    ids=bytes.hex,
)
def test_bytes_that_are_no_frame_are_refused(message: bytes) -> None:
    with pytest.raises(CodecError):
        scan(message, 0)


def test_a_signature_too_long_to_be_received_is_not_sent() -> None:
    with pytest.raises(CodecError, match="too long"):
        encode(KEY, Header(0, "s" * (SIGNATURE_BYTES_MAX + 1), DType.UINT8, (1,), 1), 0, b"x")


def mutate(chance: random.Random, message: bytes) -> bytes:
    """One to four small damages: bits, bytes, cuts, repeats, and lengths made huge."""
    changed = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(changed) + 1)
        kind = chance.randrange(5)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place:place] = bytes([chance.randrange(256)])
        elif kind == 2:
            del changed[place : place + chance.randint(1, 9)]
        elif kind == 3:
            changed[place:place] = changed[place : place + chance.randint(1, 30)]
        else:
            changed[place : place + 1] = b"\xff" * chance.randint(1, 10) + b"\x01"
    return bytes(changed)


DAMAGED_FRAMES = 100_000
TRACED_FRAMES = 20_000
"""The first of them, during which memory is measured; it triples the time of each."""


def test_one_hundred_thousand_damaged_frames_do_no_harm() -> None:
    chance = random.Random(20)
    samples = []
    for dtype in DType:
        header = header_of(dtype, (3, 5), slot=chance.getrandbits(64))
        samples.append(encode(KEY, header, 0, bytes_of(header)))
        samples.append(generated(KEY, header, 0, bytes_of(header).tobytes()).SerializeToString())
    tracemalloc.start()
    try:
        accepted = accepted_of(chance, samples, TRACED_FRAMES)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    accepted += accepted_of(chance, samples, DAMAGED_FRAMES - TRACED_FRAMES)
    assert 1_000 < accepted < 90_000


def accepted_of(chance: random.Random, samples: list[bytes], count: int) -> int:
    """How many of so many damaged frames are accepted. The others raise CodecError."""
    accepted = 0
    for _ in range(count):
        message = mutate(chance, chance.choice(samples))
        try:
            frame = scan(message, 0)
        except CodecError:
            continue
        accepted += 1
        assert_protobuf_agrees(message, frame)
    return accepted


def assert_protobuf_agrees(message: bytes, frame) -> None:
    """What is accepted is what protobuf reads; it refuses a few encodings (such as overlong tags) on top."""
    try:
        parsed = transport_pb2.DataMessage.FromString(message).frame
    except DecodeError:
        return
    assert frame.key == (parsed.group, parsed.stream, parsed.number)
    assert frame.header == (parsed.slot, parsed.signature, parsed.dtype, tuple(parsed.shape), parsed.total)
    assert (frame.offset, bytes(frame.payload)) == (parsed.offset, parsed.payload)


def told(message: bytes) -> tuple[object, ...] | str:
    """What scanning gives, or the complaint."""
    try:
        frame = scan(message, 3)
    except CodecError as error:
        return error.message
    return frame.key, frame.header, frame.offset, bytes(frame.payload)


def test_a_message_laid_out_like_the_last_of_its_length_is_read_as_if_it_were_the_first() -> None:
    """Scanning remembers how messages are laid out; nothing that differs anywhere may be taken for it."""
    chance = random.Random(9)
    header = Header(5, "all_reduce(op=sum)", DType.FLOAT32, (64,), 256)
    samples = [
        encode(Key(1, 2, number), header, offset, bytes([number] * 64)) for number, offset in ((1, 0), (2, 64), (9, 192))
    ]
    samples += [b"\xaa\x06\x03new" + samples[0], samples[0] + b"\xaa\x06\x03new"]
    for _ in range(20_000):
        first, second = chance.choice(samples), bytearray(chance.choice(samples))
        for _ in range(chance.randint(0, 2)):
            second[chance.randrange(len(second))] = chance.randrange(256)
        frames._layouts.clear()
        expected = told(bytes(second))
        frames._layouts.clear()
        told(first)
        assert told(bytes(second)) == expected


def test_a_field_that_stands_there_twice_counts_as_it_stands_last_every_time() -> None:
    header = Header(5, "a()", DType.UINT8, (8,), 8)
    for number in (1, 2):
        body = transport_pb2.DataMessage.FromString(encode(Key(1, 2, number), header, 4, b"abcd")).frame.SerializeToString()
        end = body.index(b"\x3a\x03a()")
        body = body[:end] + b"\x19" + (77).to_bytes(8, "little") + body[end:]
        assert scan(b"\x22" + bytes([len(body)]) + body, 0).key == Key(1, 2, 77)
