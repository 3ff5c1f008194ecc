"""Collectives over a third party's send and recv, where its send goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc import ProcessGroup
from ferrorpc.testing import run_groups
from tests.contract.queues import QueueBackend, queue_backends


class CutBackend(QueueBackend):
    """Rank 1 cannot reach rank 0."""

    def send(self, data: Any, dst: int, tag: int = 0) -> None:
        if (self.rank, dst) == (1, 0):
            raise OSError("the cable is cut")
        super().send(data, dst, tag)


def test_what_a_backends_send_raises_is_raised_by_the_operation():
    """Rank 0 waits for what never comes; rank 1 need not wait with it."""

    def body(group: ProcessGroup) -> None:
        with pytest.raises(OSError, match="the cable is cut" if group.rank else "rank 1 sent nothing"):
            group.all_gather(np.ones(3), timeout=60.0 if group.rank else 0.2)

    run_groups([ProcessGroup(backend) for backend in queue_backends(2, CutBackend)], body)
