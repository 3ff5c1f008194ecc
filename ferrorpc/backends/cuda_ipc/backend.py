"""The backend for ranks of one host whose GPUs can read each other's memory, above all for several ranks on one GPU.

NCCL refuses two ranks on one GPU. Here arrays on GPUs go by CUDA IPC, and arrays on the host by the host lanes.
"""

from __future__ import annotations

from typing import Any, Self

from ferrorpc.arrays.device import Device
from ferrorpc.backends.cuda_ipc.connect import CONNECT_SECONDS, SLOT_BYTES, IpcConnector, this_process
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.message import MessageBackend
from ferrorpc.errors import BackendUnavailableError


class CudaIpcBackend(DeviceBackend):
    """One rank's backend. Every rank makes its own at the same time.

    Args:
        lanes: the same ranks' backend for host memory, which all of them must share; closed with this one.
        device: this rank's GPU, which may be that of other ranks.
        slot_bytes: how much of an array is passed at a time; a group takes two and a half times that of each GPU.
        process: names this process; only tests give another name.

    The others as in `DeviceBackend`.

    Raises:
        BackendUnavailableError: the ranks do not share the memory of one host.
        NcclError: a rank could not share its GPU's memory, or open another's; the message says who.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        lanes: MessageBackend,
        device: Device,
        *,
        stream: Any = None,
        slot_bytes: int = SLOT_BYTES,
        process: str | None = None,
    ) -> None:
        if lanes.size > 1 and (lanes.control is None or lanes.arena is None):
            # Raises what else may have kept them from it, as they looked for each other: the generation's end, or a lost rank.
            lanes.session.barrier("ferrorpc/cuda_ipc/apart", timeout=CONNECT_SECONDS)
            raise BackendUnavailableError(
                "GPU memory is shared among ranks of one host that share its memory, and these do not",
                "use backend='grpc', or give each rank a GPU of its own and use backend='hybrid'",
            )
        self._process = this_process() if process is None else process
        host_peers = None if lanes.control is None else lanes.control.host_peers
        self._slot_bytes = slot_bytes
        connector = IpcConnector(device, lanes.session, host_peers, self._process, slot_bytes)
        super().__init__(lanes, device, connector, stream=stream)

    def _renewed(self, lanes: MessageBackend) -> Self:
        return type(self)(lanes, self.device, stream=self._stream, slot_bytes=self._slot_bytes, process=self._process)
