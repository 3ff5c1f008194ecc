"""The journal on file systems that lack something: shared memory, or locks.

Each runs in a child process in which the kernel refuses the system call, as it does on such a file system.
"""

import ctypes
import errno
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from ferrorpc_coordinator.journal import Journal

NUMBERS = {"x86_64": {"mmap": 9, "flock": 73}, "aarch64": {"mmap": 222, "flock": 32}}
"""Of the system calls."""
SET_SECCOMP, FILTER, NO_NEW_PRIVILEGES = 22, 2, 38
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
MAP_SHARED = 1

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in NUMBERS, reason="the system calls are those of Linux"
)


class Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("so", ctypes.c_ubyte), ("otherwise", ctypes.c_ubyte), ("value", ctypes.c_uint))


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))


def refuse(name, error, argument, bits):
    """From now on this process's calls with one of these bits in that argument fail. Words are of 8 bytes, after 16 others."""
    instructions = [
        (LOAD_WORD, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 3, NUMBERS[platform.machine()][name]),
        (LOAD_WORD, 0, 0, 16 + 8 * argument),
        (JUMP_IF_SET, 0, 1, bits),
        (RETURN, 0, 0, FAIL | error),
        (RETURN, 0, 0, ALLOW),
    ]
    library = ctypes.CDLL(None, use_errno=True)
    assert library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0, ctypes.get_errno()
    program = Program(len(instructions), (Instruction * len(instructions))(*instructions))
    assert library.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


def open_without(name, directory):
    """What the child does: opens the journal twice, and prints its rows."""
    argument, bits, error = {"mmap": (3, MAP_SHARED, errno.ENODEV), "flock": (1, 0xFF, errno.ENOSYS)}[name]
    refuse(name, error, argument, bits)
    for value in (b"first", b"second"):
        journal = Journal.open(Path(directory), reserve_bytes=0)
        print(journal.rows())
        journal.commit([("t", "k", value)])
        journal.close()


def in_a_child(name, directory):
    code = f"from {__name__} import open_without; open_without({name!r}, {str(directory)!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_no_shared_memory(tmp_path):
    child = in_a_child("mmap", tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["[]", "[('t', 'k', b'first')]"]
    assert "no other program can read the journal" in child.stderr
    journal = Journal.open(tmp_path, reserve_bytes=0)  # as after a move to another file system
    assert journal.rows() == [("t", "k", b"second")]
    journal.close()


def test_no_locks(tmp_path):
    child = in_a_child("flock", tmp_path)
    assert child.returncode != 0
    assert "its file system has no locks (Function not implemented)" in child.stderr
