"""The backend for jobs that have arrays on GPUs and on hosts: the first go by NCCL, the others by the host lanes."""

from __future__ import annotations

from ferrorpc.backends.nccl.backend import OverNccl


class HybridBackend(OverNccl):
    """One rank's backend. What goes where is `DeviceBackend`'s own choice."""

    name = "hybrid"
