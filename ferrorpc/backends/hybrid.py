"""The backend for jobs that have arrays on GPUs and on hosts: the first go by NCCL, the others by the host lanes."""

from __future__ import annotations

from typing import Any, Self

from ferrorpc.arrays.device import Device
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.device.communicator import Connector
from ferrorpc.backends.device.ending import Ending
from ferrorpc.backends.message import MessageBackend
from ferrorpc.backends.nccl.api import NcclApi
from ferrorpc.backends.nccl.connect import introduced


class HybridBackend(DeviceBackend):
    """One rank's backend. Arguments and errors as for `NcclBackend`."""

    name = "hybrid"

    def __init__(
        self,
        lanes: MessageBackend,
        device: Device,
        api: NcclApi,
        *,
        connector: Connector | None = None,
        stream: Any = None,
        ending: Ending | None = None,
    ) -> None:
        self.api = api
        super().__init__(lanes, device, introduced(lanes, device, api, connector), stream=stream, ending=ending)

    def _renewed(self, lanes: MessageBackend) -> Self:
        return type(self)(lanes, self.device, self.api, stream=self._stream)
