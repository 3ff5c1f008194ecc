"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

UNKNOWN: Final = "0+unknown"
"""The version of ferrorpc if it runs from a source folder: only an installed distribution has a number."""


def version_of(package: str) -> str:
    """The version of a distribution; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def own_version() -> str:
    """The version of ferrorpc."""
    return version_of("ferrorpc") or UNKNOWN
