"""The backend for jobs with arrays on GPUs and on hosts: NCCL moves the first, the host lanes the others."""

from __future__ import annotations

from ferrorpc.backends.nccl.backend import OverNccl


class HybridBackend(OverNccl):
    """One rank's backend. `DeviceBackend` chooses between NCCL and the host lanes."""

    name = "hybrid"
