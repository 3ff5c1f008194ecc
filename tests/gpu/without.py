"""What these tests do where there is no GPU."""

from __future__ import annotations

import pytest

from ferrorpc.arrays.devices import open_device
from ferrorpc.errors import BackendUnavailableError


def skip_without_gpu() -> None:
    """Skips the module that calls it: to collect its tests, and skip each, would take as long as hundreds of others."""
    try:
        open_device()
    except BackendUnavailableError as error:
        pytest.skip(f"needs a GPU: {error.reason}", allow_module_level=True)
