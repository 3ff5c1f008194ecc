"""Fake GPUs for tests: none of these tests needs a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import StandIn, stand_in


@pytest.fixture
def cupy() -> Iterator[StandIn]:
    """A stand-in for CuPy on a machine of eight GPUs; what its GPUs met that they should not have fails the test."""
    with stand_in(Machine(8)) as module:
        yield module
