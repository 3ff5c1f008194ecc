"""Systems that go wrong in their own ways, for the worlds that measurements are made on."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np

from ferrorpc.cli.bench.runners.base import Action, Runner
from ferrorpc.errors import BackendUnavailableError


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:  # the directory's own, which is closed by now
        return False


class Calm(Runner):
    """Ranks that need nobody: each adds up what the others would have. Setting "fault": what rank 1 does wrong."""

    name = "calm"
    version = "calm 1"

    def __init__(self, settings: Any) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_unable = settings.get("fault") == "unable"
        self.fault = settings.get("fault", "") if self.rank == 1 else ""
        if self.fault == "absent":
            raise BackendUnavailableError("calm is not at home")
        if self.fault == "stillborn":
            os.kill(os.getpid(), signal.SIGKILL)

    def barrier(self) -> Action:
        return lambda: None

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        if self.is_unable:
            raise self.unable("sums")
        return partial(self._sum, array)

    def _sum(self, array: np.ndarray[Any, Any]) -> None:
        if self.fault == "mutters":  # through the driver's socket, which is the only one
            (driver,) = (number for number in os.listdir("/proc/self/fd") if _is_socket(number))
            os.write(int(driver), b'{"seconds": [0.')
        if self.fault in ("dies", "mutters"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            signal.pause()
        array *= self.size + (self.fault == "wrong") if np.all(array == array[0]) else 3 / (self.rank + 1)

    def close(self) -> None:
        pass
