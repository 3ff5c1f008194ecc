"""Which version of a package runs here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

UNKNOWN: Final = "0+unknown"
"""Of ferrorpc where it runs from a folder of sources: only an installed distribution has a number."""


def version_of(package: str) -> str:
    """The version of an installed distribution; empty for one that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def own_version() -> str:
    """That of ferrorpc itself."""
    return version_of("ferrorpc") or UNKNOWN
