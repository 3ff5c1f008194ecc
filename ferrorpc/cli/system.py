"""What commands need of the operating system."""

from __future__ import annotations

import sys

from ferrorpc.errors import ConfigError


def require_linux(what: str, hint: str) -> None:
    """Raises ConfigError on any other system."""
    if sys.platform != "linux":
        raise ConfigError(f"{what} needs Linux, and this is {sys.platform}", hint=hint)
