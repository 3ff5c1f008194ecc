"""What the tests on a GPU share."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc.arrays.devices import open_device


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, on the process's GPU."""
    open_device().make_current()
    return pytest.importorskip("cupy")
