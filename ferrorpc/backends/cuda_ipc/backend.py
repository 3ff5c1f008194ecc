"""The backend for ranks of one host whose GPUs reach each other's memory, above all for several ranks on one GPU.

NCCL refuses two ranks on one GPU. Here arrays on GPUs go by CUDA IPC, as they go by NCCL in the hybrid backend: with the same
order of launches, deadlines, probes, streams and raw forms. Arrays on the host go by the host lanes.
"""

from __future__ import annotations

from typing import Any

from ferrorpc.arrays.device import Device
from ferrorpc.backends.cuda_ipc.connect import SLOT_BYTES, IpcConnector, this_process
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.message import MessageBackend
from ferrorpc.backends.nccl.api import Communicator, Features, NcclApi
from ferrorpc.backends.nccl.backend import session_of
from ferrorpc.backends.nccl.ending import Ending
from ferrorpc.collectives.call import Call
from ferrorpc.coordination.base import Session
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.types import ReduceOp


class CudaIpcApi:
    """What stands for NCCL's binding: there is no library, and nothing to be installed."""

    name = library = "CUDA IPC"
    version = 1
    features = Features(non_blocking=True, split=False, scalable=False, bfloat16=True)

    def unique_id(self) -> bytes:
        """Ranks meet in shared memory."""
        raise AssertionError("CUDA IPC has no ids")

    def init(self, size: int, rank: int, unique_ids: Any) -> Communicator:
        """An `IpcConnector` makes communicators."""
        raise AssertionError("CUDA IPC has no ids")


class CudaIpcBackend(HybridBackend):
    """One rank's backend. Made by every rank at the same time.

    Args:
        lanes: the same ranks' backend for host memory, which all of them must share; closed with this one.
        device: this rank's GPU, which may be that of other ranks.
        api: what is told of it in words.
        slot_bytes: what of an array is passed at a time; a group takes a little more than twice that of each GPU.
        process: which process this is; only tests say another.

    The others as in `NcclBackend`.

    Raises:
        BackendUnavailableError: the ranks do not share the memory of one host.
        NcclError: a rank could not share its GPU's memory, or open another's; the message says who.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        lanes: MessageBackend,
        device: Device,
        api: NcclApi | None = None,
        *,
        stream: Any = None,
        ending: Ending | None = None,
        slot_bytes: int = SLOT_BYTES,
        process: str | None = None,
    ) -> None:
        if lanes.size > 1 and (lanes.board is None or lanes.arena is None):
            raise BackendUnavailableError(
                "GPU memory is shared among ranks of one host that share its memory, and these do not",
                "use backend='grpc', or give each rank a GPU of its own and use backend='hybrid'",
            )
        process = this_process() if process is None else process
        memory = None if lanes.board is None else lanes.board.memory
        connector = IpcConnector(device, session_of(lanes), memory, process, slot_bytes)
        super().__init__(lanes, device, api or CudaIpcApi(), connector=connector, stream=stream, ending=ending)

    def _suits_nccl(self, call: Call) -> bool:
        """NumPy divides complex numbers in a way of its own, so a mean of them has its bits on the host alone."""
        is_mean = call.op is ReduceOp.MEAN and call.inputs[0].dtype.is_complex
        return not is_mean and super()._suits_nccl(call)

    def _explained(self) -> str:
        return "by reading each other's GPU memory (CUDA IPC)"

    def _introduce(self, line: Session, device: Device, api: NcclApi, timeout: float) -> None:
        """Nothing keeps them apart but what their connecting would show."""
