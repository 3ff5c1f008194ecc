"""The backend that has every array go by NCCL: those of the host are copied to the GPU and back.

NCCL adds in an order of its own: sums are equal on all ranks, but not the left fold of the other backends.
"""

from __future__ import annotations

from typing import Any, Self

from ferrorpc.arrays.device import Device
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.message import MessageBackend
from ferrorpc.backends.nccl.api import NcclApi
from ferrorpc.backends.nccl.connect import NcclConnector
from ferrorpc.backends.nccl.identity import introduce
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Prepared
from ferrorpc.errors import UsageError


class OverNccl(DeviceBackend):
    """What the backends over NCCL have in common: how they are made. Every rank makes its own at the same time.

    Args:
        lanes: the same ranks' backend for host memory; closed with this one.
        device: this rank's GPU.
        api: the binding of NCCL.

    The others as in `DeviceBackend`.

    Raises:
        BackendUnavailableError: two ranks have one GPU, or their versions of NCCL differ; all of them are named.
        NcclError: the communicator could not be made; the message says who did not come or what each rank met.
    """

    def __init__(self, lanes: MessageBackend, device: Device, api: NcclApi, *, stream: Any = None) -> None:
        self.api = api
        introduce(lanes.session, device.uuid, api.version, api.name, lanes.timeout)
        connector = NcclConnector(api, lanes.session, device.beside_captures)
        super().__init__(lanes, device, connector, stream=stream)

    def _renewed(self, lanes: MessageBackend) -> Self:
        return type(self)(lanes, self.device, self.api, stream=self._stream)


class NcclBackend(OverNccl):
    """One rank's backend."""

    name = "nccl"

    @property
    def arena(self) -> None:  # type: ignore[override]
        """None: no collective goes by the host lanes."""
        return None

    def prepare(self, call: Call) -> Prepared:
        if call.operation is Operation.BARRIER:
            return super().prepare(call)
        if call.wire is not None or call.algorithm is not None:
            raise UsageError(
                f"NCCL chooses its own algorithm and compresses nothing, so {call.signature} is not for it",
                hint="leave wire= and algorithm= away, or use backend='hybrid', which takes such calls through the host",
            )
        return self.prepare_on_device(call)

    def explain(self, call: Call) -> str:
        return self.lanes.explain(call) if call.operation is Operation.BARRIER else self.explain_on_device(call)
