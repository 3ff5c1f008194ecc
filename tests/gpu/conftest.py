"""Tests that need a GPU; elsewhere they are skipped."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc.arrays.cupy_device import open_device
from ferrorpc.errors import BackendUnavailableError


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, where there is a GPU."""
    try:
        open_device().make_current()
    except BackendUnavailableError as error:
        pytest.skip(f"needs a GPU: {error.reason}")
    return pytest.importorskip("cupy")
