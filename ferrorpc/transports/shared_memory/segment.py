"""A segment: the memory of one rank that others can map. It is a sealed memfd with an allocator that only its owner uses.

A memfd has no name that could outlive its process, and Docker's 64 MiB limit on /dev/shm does not apply to it. The segment is
much larger than what will be used. Pages are only taken when they are touched, so nobody has to guess a size, and no mapping
ever has to change. The memfd is sealed against shrinking and growing, so that nothing that another process does can turn a read
into a SIGBUS. Peers get a read-only descriptor.

Costs: `allocate` and `free` search the list of free ranges, which is short because adjacent ranges are merged; `locate` is
address arithmetic.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import resource
import sys
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any, Final

import numpy as np

from ferrorpc.errors import BackendUnavailableError, CodecError, GroupClosedError, LimitExceededError

PAGE_BYTES: Final = mmap.PAGESIZE
NONCE_BYTES: Final = 32
"""Length of the nonce at the beginning of a segment, which its owner has also sent to the others by another way."""

CONTROL_OFFSET: Final = PAGE_BYTES
CONTROL_BYTES: Final = (1 << 20) - CONTROL_OFFSET
"""Size of the control area at CONTROL_OFFSET, from which peers find everything else. It begins as zeros and holds no blocks."""

ALIGN_BYTES: Final = 64
PUNCH_HOLE_BYTES_MIN: Final = 1 << 20
"""Blocks of this size or more take whole pages, which are returned to the kernel when the block is freed."""

SIZE_BYTES_MIN: Final = 64 << 20
ADDRESS_SPACE_BYTES: Final = 1 << 46
"""Address space that all segments of a world together may take: half of what an x86-64 process has."""

_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_address_of: Final = ctypes.addressof
_first_byte: Final = ctypes.c_char.from_buffer
"""Bound here once, for speed in `locate`."""

if (
    sys.platform == "linux"
):  # elsewhere there is no segment (host_identity.unsupported_reason), but whoever can do without imports this as well
    _SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _libc: Final = ctypes.CDLL(None, use_errno=True)
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    _libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    _libc.mmap.restype = ctypes.c_void_p


class Block:
    """Allocated bytes of a segment, until `free`. Their content is undefined at first."""

    __slots__ = ("_segment", "_size_bytes", "array", "offset")

    def __init__(self, segment: Segment, offset: int, size_bytes: int, array: Bytes) -> None:
        self._segment = segment
        self._size_bytes = size_bytes
        self.offset = offset
        """Where it begins in the segment, as peers need to know."""
        self.array = array
        """A writable uint8 view, as long as was asked for. Not to be used after `free`."""

    def free(self) -> None:
        """Frees the bytes for other blocks. Idempotent; may be called from any thread and from finalizers."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        if size_bytes:
            self._segment.release(self.offset, size_bytes)


class _FreeRanges:
    """The free ranges of a segment, by offset. The caller holds a lock."""

    def __init__(self, offset: int, size_bytes: int) -> None:
        self._offsets = [offset]
        self._sizes = [size_bytes]

    def take(self, size_bytes: int, unit: int) -> int | None:
        """Takes `size_bytes` at the lowest free multiple of `unit`. Returns their offset; None where there is none."""
        for place, (start, available) in enumerate(zip(self._offsets, self._sizes, strict=True)):
            offset = -(-start // unit) * unit
            left = start + available - offset - size_bytes
            if left >= 0:
                if left:  # shortened in place: an interrupt loses what is taken, not the whole range
                    self._offsets[place], self._sizes[place] = offset + size_bytes, left
                else:
                    del self._offsets[place], self._sizes[place]
                self.give(start, offset - start)
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """Adds a free range and merges it with the ranges next to it."""
        if size_bytes == 0:
            return
        place = bisect_left(self._offsets, offset)
        if place < len(self._offsets) and offset + size_bytes == self._offsets[place]:
            size_bytes += self._sizes.pop(place)
            del self._offsets[place]
        if place and self._offsets[place - 1] + self._sizes[place - 1] == offset:
            self._sizes[place - 1] += size_bytes
        else:
            self._offsets.insert(place, offset)
            self._sizes.insert(place, size_bytes)

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)


class Segment:
    """One rank's memory in one generation: writable here, and readable for processes that get its read-only descriptor.

    In a forked child the segment is closed and its mapping becomes private, also where only arrays have outlived it: nobody
    else sees what the child writes into them. It is no snapshot: pages that the child has not written show what its parent
    writes later.

    Args:
        name: shown in /proc/<pid>/maps.
        nonce: NONCE_BYTES secret bytes, written at the beginning.
        size_bytes: size of the mapping; halved, down to SIZE_BYTES_MIN, where the system refuses it.

    Raises:
        BackendUnavailableError: the system refuses even SIZE_BYTES_MIN.
    """

    def __init__(self, name: str, nonce: bytes, size_bytes: int) -> None:
        mapped, self._descriptor = _make(name, size_bytes)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self.size_bytes = len(mapped)
        self.memory: Bytes = np.frombuffer(mapped, np.uint8)
        """The whole mapping, uint8, writable; empty once the segment is closed."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._end = self.address + self.size_bytes
        self.nonce = nonce
        self.memory[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        self._free = _FreeRanges(CONTROL_OFFSET + CONTROL_BYTES, self.size_bytes - CONTROL_OFFSET - CONTROL_BYTES)
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._closed = self._is_private = False
        self._mapped = weakref.ref(mapped)
        weakref.finalize(mapped, os.close, self._descriptor).atexit = False  # a child needs it as long as there are arrays
        _segments.add(self)

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated blocks, including their rounding."""
        with self._lock:
            self._collect()
            return self.size_bytes - CONTROL_OFFSET - CONTROL_BYTES - self._free.free_bytes

    def allocate(self, nbytes: int) -> Block:
        """Allocates `nbytes` bytes at a multiple of ALIGN_BYTES, or of a page where PUNCH_HOLE_BYTES_MIN or more.

        Raises:
            LimitExceededError: there is no free range of that size.
            GroupClosedError: after `close`, or in a forked child.
        """
        unit = PAGE_BYTES if nbytes >= PUNCH_HOLE_BYTES_MIN else ALIGN_BYTES
        size_bytes = max(unit, -(-nbytes // unit) * unit)
        with self._lock:
            if self._closed:
                raise GroupClosedError("this shared memory is closed")
            self._collect()
            offset = self._free.take(size_bytes, unit)
            if offset is None:
                raise LimitExceededError(
                    f"no {nbytes} bytes in a row are free in this rank's shared memory: {self._free.free_bytes} of "
                    f"{self.size_bytes} bytes are free",
                    hint="let go of arrays made by group.empty(), raise `ulimit -v` and `-f`, or use transport='grpc'",
                )
            memory = self.memory
        return Block(self, offset, size_bytes, memory[offset : offset + nbytes])

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A C-contiguous array in this memory. Its bytes are freed when the last view of it is gone.

        The mapping stays as long as such an array exists, even after `close`. An array without elements lies outside the
        segment. Raises as `allocate`.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        block = self.allocate(nbytes)
        # Views of the array must keep `base` alive. Views of a view refer to `memory` alone; hence a buffer between the two.
        base = np.frombuffer(block.array.data, np.uint8)
        weakref.finalize(base, block.free).atexit = False
        return np.ndarray(shape, dtype, base.data)

    def locate(self, array: np.ndarray[Any, Any]) -> int | None:
        """Offset of a C-contiguous array in this segment. None where it is not completely in the segment, or is strided."""
        try:
            address = _address_of(_first_byte(array))  # type: ignore[arg-type, unused-ignore]
        except (TypeError, ValueError, BufferError):
            # Read-only, empty, strided, or of a dtype without the buffer protocol: the slow way works for all.
            if not array.flags.c_contiguous:
                return None
            address = array.__array_interface__["data"][0]
        if self.address <= address and address + array.nbytes <= self._end:
            return address - self.address
        return None

    def read_only_descriptor(self) -> int:
        """A new read-only file descriptor of this memory, which the caller closes."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def release(self, offset: int, size_bytes: int) -> None:
        """Frees the bytes of a block. A finalizer may call it at any point of a thread, such as in `allocate`."""
        self._released.append((offset, size_bytes))
        if not self._lock.locked():
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        """Adds the released ranges to the free ones. The caller holds the lock."""
        while self._released:
            offset, size_bytes = self._released.popleft()
            if size_bytes >= PUNCH_HOLE_BYTES_MIN and not self._closed:
                _libc.fallocate(self._descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, size_bytes)
            self._free.give(offset, size_bytes)

    def close(self) -> None:
        """Ends allocation. The mapping is removed with the last array in it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end = self.address
                self.memory = np.empty(0, np.uint8)

    def make_private(self) -> None:
        """In a forked child: replaces the shared mapping by a private one, in which pages are copied when the child writes."""
        self._lock = threading.Lock()
        if self._is_private or self._mapped() is None:  # closed, and without arrays
            return
        self._is_private = True
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        mapped = _libc.mmap(self.address, self.size_bytes, protection, flags, self._descriptor, 0)
        if mapped != self.address:
            _libc.mprotect(self.address, self.size_bytes, mmap.PROT_READ)
        self.close()


def default_bytes(members: int) -> int:
    """Size of each segment in a world of `members` ranks, all of which one process may have to map.

    Twice the machine's memory: more cannot be filled, and unused ranges between blocks cost nothing.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    allowed_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    space_bytes = ADDRESS_SPACE_BYTES if allowed_bytes == resource.RLIM_INFINITY else allowed_bytes // 2
    return max(SIZE_BYTES_MIN, min(2 * memory_bytes, space_bytes // members) // PAGE_BYTES * PAGE_BYTES)


def map_peer(descriptor: int, size_bytes: int, nonce: bytes) -> Bytes:
    """Maps a peer's segment read-only: uint8, shape (size_bytes,). The mapping lives as long as views of it.

    Raises:
        CodecError: it is no sealed segment of that size, or does not begin with the nonce.
        BackendUnavailableError: this process may not map so much.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise CodecError("the descriptor of a peer's memory is not that of a memfd") from None
    actual_bytes = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or actual_bytes != size_bytes or size_bytes < CONTROL_OFFSET + CONTROL_BYTES:
        raise CodecError(
            f"a peer's memory has {actual_bytes} bytes and seals {seals:#x}; {size_bytes} sealed bytes were announced"
        )
    try:
        mapped = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise BackendUnavailableError(f"cannot map {size_bytes} bytes of a peer's memory: {error.strerror}") from None
    mapped.madvise(mmap.MADV_DONTDUMP)
    if mapped[:NONCE_BYTES] != nonce:
        raise CodecError("a peer's memory does not begin with the secret that its owner announced")
    return np.frombuffer(mapped, np.uint8)


def _make(name: str, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Makes a mapped and sealed memfd of at most that size. Returns it and its descriptor."""
    try:
        return _make_sized(name, size_bytes)
    except OSError as error:
        if size_bytes // 2 < SIZE_BYTES_MIN:
            raise BackendUnavailableError(
                f"cannot have {size_bytes} bytes of shared memory: {error.strerror}",
                "raise `ulimit -v`, or use transport='grpc'",
            ) from None
    return _make(name, size_bytes // 2 // PAGE_BYTES * PAGE_BYTES)


def _make_sized(name: str, size_bytes: int) -> tuple[mmap.mmap, int]:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        mapped = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return mapped, descriptor


_segments: Final[weakref.WeakSet[Segment]] = weakref.WeakSet()


def _make_all_private() -> None:
    for segment in list(_segments):
        segment.make_private()


os.register_at_fork(after_in_child=_make_all_private)
