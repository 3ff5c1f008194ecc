"""One rank's memory that others can map: a sealed memfd, and the allocator that its owner keeps for it.

A memfd has no name that could outlive a process, and Docker's 64 MiB limit on /dev/shm does not apply to it. The segment is
made much larger than what will be used: pages are only taken when they are touched, so nobody has to guess a size, and a
mapping never has to be changed. It is sealed against shrinking and growing, so a page that a peer sees stays there: nothing
that another process does can turn a read into a SIGBUS. Others get a descriptor that is open for reading only.

Costs: allocate and free are a search in the list of gaps (few, as neighbouring gaps join); `locate` is address arithmetic.
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

from ferrorpc.errors import BackendUnavailableError, CodecError, GroupClosedError, LimitExceededError, UsageError

PAGE_BYTES: Final = mmap.PAGESIZE
NONCE_BYTES: Final = 32
"""The first bytes of a segment: a secret that its owner told the others by another way."""

CONTROL_OFFSET: Final = PAGE_BYTES
CONTROL_BYTES: Final = (1 << 20) - CONTROL_OFFSET
"""These, from CONTROL_OFFSET on, are zero at first, at the same place everywhere, and no block's: where peers begin to look."""

ALIGN_BYTES: Final = 64
PUNCH_HOLE_BYTES_MIN: Final = 1 << 20
"""Blocks of this size or more take whole pages, and give them back when they are freed."""

SIZE_BYTES_MIN: Final = 64 << 20
ADDRESS_SPACE_BYTES: Final = 1 << 46
"""Half of what an x86-64 process can address: what all segments of a world together may take."""

_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_address_of: Final = ctypes.addressof
_first_byte: Final = ctypes.c_char.from_buffer
"""Looked up once, for `locate`."""

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
    """Bytes of a segment, from `allocate` until `free`. Their content is undefined until somebody writes it."""

    __slots__ = ("_segment", "_size_bytes", "array", "nbytes", "offset")

    def __init__(self, segment: Segment, offset: int, nbytes: int, size_bytes: int, array: Bytes) -> None:
        self._segment = segment
        self._size_bytes = size_bytes
        self.offset = offset
        """Where it begins in the segment: what peers must know."""
        self.nbytes = nbytes
        self.array = array
        """A writable uint8 view, shape (nbytes,). Not to be used after `free`."""

    def free(self) -> None:
        """Makes the bytes available to others. Idempotent; from any thread, a finaliser included."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        if size_bytes:
            self._segment.release(self.offset, size_bytes)


class _FreeRanges:
    """The free ranges of a segment, by offset. Its user holds a lock."""

    def __init__(self, offset: int, size_bytes: int) -> None:
        self._offsets = [offset]
        self._sizes = [size_bytes]

    def take(self, size_bytes: int, align: int) -> int | None:
        """The lowest offset at a multiple of `align` with so many free bytes; None where there is no such gap."""
        for place, (start, available) in enumerate(zip(self._offsets, self._sizes, strict=True)):
            offset = -(-start // align) * align
            if offset + size_bytes <= start + available:
                del self._offsets[place], self._sizes[place]
                self.give(offset + size_bytes, start + available - offset - size_bytes)
                self.give(start, offset - start)
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """A range is free; it joins the gaps that it touches."""
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
    """One rank's memory in one generation, writable here and readable for those who get its descriptor.

    In a forked child the segment is closed, and what was mapped becomes private to the child: arrays keep their values, and
    what the child writes into them nobody else sees.

    Args:
        name: what /proc/<pid>/maps shows.
        nonce: NONCE_BYTES secret bytes, written at the beginning.
        size_bytes: of the mapping; tried smaller, down to SIZE_BYTES_MIN, where the system refuses. None: `default_bytes(1)`.

    Raises:
        BackendUnavailableError: this process may not have even SIZE_BYTES_MIN.
    """

    def __init__(self, name: str, nonce: bytes, size_bytes: int | None = None) -> None:
        if len(nonce) != NONCE_BYTES:
            raise UsageError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        mapped, self._descriptor = _make(name, default_bytes(1) if size_bytes is None else size_bytes)
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
        self._closed = False
        _segments.add(self)

    @property
    def used_bytes(self) -> int:
        """What is allocated now, rounded as allocations are."""
        with self._lock:
            self._collect()
            return self.size_bytes - CONTROL_OFFSET - CONTROL_BYTES - self._free.free_bytes

    def allocate(self, nbytes: int, align: int = ALIGN_BYTES) -> Block:
        """Takes `nbytes` bytes at a multiple of `align` (a power of two; 4 KiB at least for a MiB and more).

        Raises:
            LimitExceededError: there is no gap of that size.
            GroupClosedError: after `close`, or in a forked child.
        """
        if nbytes < 0 or align < 1 or align & (align - 1):
            raise UsageError(f"cannot allocate {nbytes} bytes at a multiple of {align}")
        unit = PAGE_BYTES if nbytes >= PUNCH_HOLE_BYTES_MIN else ALIGN_BYTES
        size_bytes = max(unit, -(-nbytes // unit) * unit)
        with self._lock:
            if self._closed:
                raise GroupClosedError("this shared memory is closed")
            self._collect()
            offset = self._free.take(size_bytes, max(align, unit))
            if offset is None:
                raise LimitExceededError(
                    f"no {nbytes} bytes in a row are free in this rank's shared memory: {self._free.free_bytes} of "
                    f"{self.size_bytes} bytes are free",
                    hint="let go of arrays made by group.empty() that are no longer needed",
                )
            memory = self.memory
        return Block(self, offset, nbytes, size_bytes, memory[offset : offset + nbytes])

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A C-contiguous array in this memory; its bytes are freed when the last view of it is gone.

        The mapping outlives `close` for as long as such an array does. An array without elements lies nowhere. Raises as
        `allocate`.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        block = self.allocate(nbytes)
        # A buffer between the two: every view of the array holds `base`, whereas views of a view would hold `memory` alone.
        base = np.frombuffer(block.array.data, np.uint8)
        weakref.finalize(base, block.free).atexit = False
        return np.ndarray(shape, dtype, base.data)

    def locate(self, array: np.ndarray[Any, Any]) -> int | None:
        """Where a C-contiguous array begins in this segment; None where it does not lie wholly in it, or is strided."""
        try:
            address = _address_of(_first_byte(array))  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):
            # Read-only, empty, strided, or of a dtype that has no buffer: the slow and sure way.
            if not array.flags.c_contiguous:
                return None
            address = array.__array_interface__["data"][0]
        if self.address <= address and address + array.nbytes <= self._end:
            return address - self.address
        return None

    def read_only_descriptor(self) -> int:
        """A new file descriptor of this memory, open for reading only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def release(self, offset: int, size_bytes: int) -> None:
        """A block's bytes are free. Never blocks: it may be called while this very thread is in `allocate`."""
        self._released.append((offset, size_bytes))
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Takes in what was given back. The lock is held."""
        while self._released:
            offset, size_bytes = self._released.popleft()
            if size_bytes >= PUNCH_HOLE_BYTES_MIN and not self._closed:
                _libc.fallocate(self._descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, size_bytes)
            self._free.give(offset, size_bytes)

    def close(self) -> None:
        """Nothing more is allocated; the mapping goes with the last array in it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)
                self._end = self.address
                self.memory = np.empty(0, np.uint8)

    def make_private(self) -> None:
        """In a forked child: cuts the mapping off from its owner's, with what it holds."""
        self._lock = threading.Lock()
        if self._closed:
            return
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        mapped = _libc.mmap(self.address, self.size_bytes, protection, flags, self._descriptor, 0)
        if mapped != self.address:
            _libc.mprotect(self.address, self.size_bytes, mmap.PROT_READ)
        self.close()


def default_bytes(members: int) -> int:
    """How large each of the segments of `members` ranks is made, all of which one process may have to map.

    Twice the machine's memory: more cannot be filled, and gaps between blocks cost nothing.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    allowed_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    space_bytes = ADDRESS_SPACE_BYTES if allowed_bytes == resource.RLIM_INFINITY else allowed_bytes // 2
    return max(SIZE_BYTES_MIN, min(2 * memory_bytes, space_bytes // members) // PAGE_BYTES * PAGE_BYTES)


def map_peer(descriptor: int, size_bytes: int, nonce: bytes) -> Bytes:
    """A peer's segment, read-only: uint8, shape (size_bytes,). The mapping lives as long as views of it.

    Raises:
        CodecError: it is no segment of that size, could still shrink, or does not begin with the nonce.
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
    """A mapped and sealed memfd of at most that size, and its descriptor."""
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
