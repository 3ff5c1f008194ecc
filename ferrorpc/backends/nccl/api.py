"""What is asked of NCCL besides its communicators: a protocol that bindings implement, and a fake on NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ferrorpc.backends.device.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Features:
    """What a binding and the library that it found can do."""

    non_blocking: bool
    """Communicators never block the host, so their initialisation can be aborted (NCCL 2.14)."""
    split: bool
    """Communicators can be split from others, without an id (NCCL 2.18)."""
    scalable: bool
    """A communicator can be made from several ids (NCCL 2.23)."""

    @classmethod
    def of(cls, version: int, non_blocking: bool = True) -> Features:
        """Those of a library of this version, such as 22809; `non_blocking` is False for bindings that lack it."""
        return cls(non_blocking and version >= 21400, version >= 21800, version >= 22300)


class NcclApi(Protocol):
    """One binding."""

    name: str
    """Which binding, such as "nccl4py"."""
    version: int
    """That of the library, such as 22809 for 2.28.9."""
    features: Features
    """What works with it."""

    def unique_id(self) -> bytes:
        """ncclGetUniqueId: 128 bytes. Opens a socket and a thread in this process until it is used."""

    def init(self, size: int, rank: int, unique_ids: Sequence[bytes]) -> Communicator:
        """ncclCommInitRank on the current device. The communicator's state is IN_PROGRESS until all ranks have come."""
