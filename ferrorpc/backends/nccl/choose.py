"""Which binding of NCCL a process uses: the first that works, nccl4py before CuPy's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ferrorpc.arrays.devices import INSTALL
from ferrorpc.backends.nccl.api import NcclApi
from ferrorpc.backends.nccl.cupy_nccl import open_cupy_nccl
from ferrorpc.backends.nccl.nccl4py import open_nccl4py
from ferrorpc.errors import BackendUnavailableError

BINDINGS: Final[tuple[Callable[[], NcclApi], ...]] = (open_nccl4py, open_cupy_nccl)
MINIMUM_VERSION: Final = 21000
"""NCCL 2.10, the first with bfloat16 and MEAN."""
_log = logging.getLogger("ferrorpc.backends.nccl")


def open_nccl() -> NcclApi:
    """Opens the binding.

    Raises:
        BackendUnavailableError: none works; the message says what each lacks, and the hint is the command that installs one.
    """
    lacking = []
    for binding in BINDINGS:
        try:
            api = binding()
        except BackendUnavailableError as error:
            lacking.append(error.reason)
            continue
        if api.version < MINIMUM_VERSION:
            lacking.append(f"{api.name}: its NCCL is {api.version}, and {MINIMUM_VERSION} is needed")
            continue
        _log.info("NCCL %d through %s", api.version, api.name)
        if not api.features.non_blocking:
            _log.warning("through %s an NCCL initialisation cannot be aborted: install nccl4py (%s)", api.name, INSTALL)
        return api
    raise BackendUnavailableError(f"NCCL needs a binding, and none works here: {'; '.join(lacking)}", INSTALL)
