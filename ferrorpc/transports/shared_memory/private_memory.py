"""Reading another process's private memory with one copy: process_vm_readv, through ctypes, which releases the GIL.

Linux grants it to whoever may trace the other process: the same user, unless a container's seccomp profile or Yama's
ptrace_scope says no. So it is tried once, with a secret, before anything relies on it. A process id may be given to another
process once its own has ended; a pidfd tells whether it had not, and so whom the bytes came from.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from typing import Any, Final

import numpy as np

from ferrorpc.errors import BackendUnavailableError, CodecError, PeerLostError, UsageError

READ_BYTES_MAX: Final = 1 << 30
"""In one call; the kernel takes less than 2 GiB."""

_HINT: Final = "check /proc/sys/kernel/yama/ptrace_scope and the container's seccomp profile, or use transport='grpc'"


class _Extent(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_readv: Final = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Extent),
    ctypes.c_ulong,
    ctypes.POINTER(_Extent),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class PrivateMemory:
    """The memory of the process of world rank `rank`.

    Args:
        process: its id, as this process's namespace knows it.

    Raises:
        BackendUnavailableError: it has none here, or has ended.
    """

    def __init__(self, rank: int, process: int) -> None:
        self.rank = rank
        self._process = process
        if process <= 0:
            raise BackendUnavailableError(f"the process of rank {rank} is in another process namespace")
        try:
            self._handle = os.pidfd_open(process)
        except OSError as error:
            raise BackendUnavailableError(f"the process {process} of rank {rank} cannot be watched: {error.strerror}") from None

    def read(self, address: int, target: np.ndarray[Any, Any]) -> None:
        """Fills `target` (C-contiguous, writable) with the bytes from `address` on.

        Raises:
            PeerLostError: the process has ended.
            BackendUnavailableError: the kernel does not permit it.
            CodecError: the process has no such memory.
        """
        if not (target.flags.c_contiguous and target.flags.writeable):
            raise UsageError("private memory is read into a contiguous, writable array")
        start, done = target.__array_interface__["data"][0], 0
        while done < target.nbytes:
            done += self._read(address + done, start + done, min(target.nbytes - done, READ_BYTES_MAX))
        if self._ended():
            raise PeerLostError(self.rank, "its process has ended")

    def _ended(self) -> bool:
        poll = select.poll()  # one for each call, because two threads may not share one
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def _read(self, address: int, start: int, size_bytes: int) -> int:
        ours, theirs = _Extent(start, size_bytes), _Extent(address, size_bytes)
        count: int = _readv(self._process, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if count == size_bytes:
            return count
        code = ctypes.get_errno() if count < 0 else errno.EFAULT
        if code == errno.ESRCH or self._ended():
            raise PeerLostError(self.rank, "its process has ended")
        if code == errno.EFAULT:
            raise CodecError(f"rank {self.rank} has no {size_bytes} readable bytes at {address:#x}")
        raise BackendUnavailableError(f"reading the memory of rank {self.rank} is refused: {os.strerror(code)}", _HINT)

    def close(self) -> None:
        """Nothing more is read. Idempotent."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
