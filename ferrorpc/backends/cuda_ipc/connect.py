"""Makes communicators whose ranks have each other's GPU memory open.

Each rank allocates a slab of its GPU's memory and a control block in shared memory, tells the others where the block is, and
opens what they have allocated. Then all ranks say how it went, so that the outcome is the same on every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np

from ferrorpc.arrays.device import Device
from ferrorpc.backends.cuda_ipc.communicator import ABORT_SECONDS, IpcCommunicator
from ferrorpc.backends.cuda_ipc.control_block import ControlBlock, block_bytes
from ferrorpc.backends.cuda_ipc.peers import Own, Peer, part
from ferrorpc.backends.device.communicator import Communicator
from ferrorpc.collectives.arena.control_blocks import Array
from ferrorpc.collectives.driver import place_in_user_code
from ferrorpc.coordination.base import Session
from ferrorpc.errors import FerroError, NcclError
from ferrorpc.generation_errors import reason_of
from ferrorpc.transports.shared_memory.host_peers import HostPeers

CONNECT_SECONDS: Final = 30.0
SLOT_BYTES: Final = 64 << 20
"""What of an array is passed at a time. Where processes take turns on a GPU, each turn costs some 0.15 ms, and larger slots
need fewer: on an H100 slots of 64 MiB reduce 256 MiB in 1.7 ms, those of 32 MiB in 2.5 ms."""
PROBLEM_CHARACTERS: Final = 1024
"""Of an error message, at most: what ranks say in a barrier is bounded."""


def this_process() -> str:
    """A name of this process that no other has, also not in another container or after a fork."""
    return f"{os.getpid()}-{_nonce}"


class IpcConnector:
    """Makes communicators for one rank.

    Args:
        device: its GPU.
        session: with the coordinator.
        host_peers: the ranks, which share memory; None in a world of one.
        process: names this process: memory of ranks in the same process need not be opened.
        slot_bytes: how much of an array is passed at a time, as in `Own`.
    """

    library = "CUDA IPC"
    waits_on_gpu = False
    split = None
    explanation = "by reading each other's GPU memory (CUDA IPC)"

    def __init__(self, device: Device, session: Session, host_peers: HostPeers | None, process: str, slot_bytes: int) -> None:
        self._device = device
        self._session = session
        self._host_peers = host_peers
        self._process = process
        self._asked_bytes = slot_bytes

    def connect(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A new communicator of these world ranks, in their order; each of them calls it.

        Raises:
            NcclError: a rank could not share its GPU memory, or open another's; the message says who.
            BarrierTimeoutError: who did not come.
            FerroError: the cause that ended the generation.
        """
        own_rank, size = list(ranks).index(self._session.membership.assignment.rank), len(ranks)
        clock, peers, problem, made = self._session.clock, list[Peer](), "", None
        of_user: Exception | None = None
        with ExitStack() as undo:
            offset, bytes_, free = self._room(block_bytes(size))
            undo.callback(free)
            block = ControlBlock(bytes_, size)
            block.name()
            own = Own(self._device, block, own_rank, size, self._asked_bytes)
            undo.callback(part, own, peers, clock, ABORT_SECONDS)
            try:
                own.put_up()
            except Exception as error:  # noqa: BLE001  the others wait to hear of it, whatever it is
                problem, of_user = self._told(error), error if place_in_user_code(error) else None
            told = json.dumps({"offset": offset, "process": self._process, "problem": problem})
            others = [json.loads(text) for text in self._meet(f"{name}/put-up", ranks, told)]
            if not any(other["problem"] for other in others):
                for place, (rank, other) in enumerate(zip(ranks, others, strict=True)):
                    if place != own_rank:
                        theirs, is_here = self._block_of(rank, other["offset"], size), other["process"] == self._process
                        peers.append(Peer(self._device, theirs, place, own_rank, is_here))
                try:
                    for peer in peers:
                        peer.open()
                    made = IpcCommunicator(self._device, clock, own, peers, free)
                except Exception as error:  # noqa: BLE001  as above
                    problem, of_user = self._told(error), error if place_in_user_code(error) else None
            met = dict(zip(ranks, self._meet(f"{name}/opened", ranks, problem), strict=True))
            if made is not None and not any(met.values()):
                undo.pop_all()
                return made
        if of_user is not None:  # of a signal handler
            raise of_user
        raise NcclError(
            f"the ranks of {name!r} cannot share GPU memory: "
            + "; ".join(f"rank {rank}: {words}" for rank, words in met.items() if words),
            hint="they need one host, GPUs that reach each other, and in containers one IPC namespace (--ipc=host); "
            "or use backend='grpc'",
        )

    def _room(self, size_bytes: int) -> tuple[int, Array, Callable[[], None]]:
        """Zeroed memory that the others can read, its offset for them, and a function that frees it."""
        if self._host_peers is None:  # a world of one, whose memory goes with its last reference
            return 0, np.zeros(size_bytes, np.uint8), lambda: None
        block = self._host_peers.own.allocate(size_bytes)
        block.array[:] = 0
        return block.offset, block.array, block.free

    def _block_of(self, rank: int, offset: int, size: int) -> ControlBlock:
        if self._host_peers is None:
            raise AssertionError(f"rank {rank} shares no memory")
        return ControlBlock(self._host_peers.memory(rank)[offset : offset + block_bytes(size)], size)

    def _told(self, error: Exception) -> str:
        """What the others hear of an error. Raises the cause that ended the generation, of which they hear as well."""
        self._session.membership.latch.check()
        text = error.message if isinstance(error, FerroError) else reason_of(error)
        return text.encode("ascii", "backslashreplace").decode()[:PROBLEM_CHARACTERS]

    def _meet(self, name: str, ranks: Sequence[int], said: str) -> list[str]:
        """Exchanges texts. Returns those of all ranks, in their order."""
        texts = self._session.barrier(f"ferrorpc/cuda_ipc/{name}", said.encode(), ranks=ranks, timeout=CONNECT_SECONDS)
        by_rank = dict(zip(sorted(ranks), (text.decode() for text in texts), strict=True))
        return [by_rank[rank] for rank in ranks]


_nonce: Final = os.urandom(8).hex()
