"""Exit codes that tell whoever started a process (a scheduler, a script, `ferrorpc run`) whether a retry can help."""

from __future__ import annotations

from typing import Final

from ferrorpc.errors import (
    AuthenticationError,
    BackendUnavailableError,
    ConfigError,
    FerroError,
    PermissionDeniedError,
    VersionMismatchError,
)

EXIT_CONFIG: Final = 64
"""Bad configuration: a retry cannot help."""
EXIT_FAILED: Final = 70
"""A coordinator failed; with a data directory it can be started again."""
EXIT_RETRY: Final = 75
"""The membership or the coordinator was lost, and nothing is wrong with this process: a retry can succeed."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT."""
EXIT_PIPE: Final = 141
"""128 + SIGPIPE."""

CONFIGURATION_ERRORS: Final = (
    ConfigError,
    AuthenticationError,
    PermissionDeniedError,
    VersionMismatchError,
    BackendUnavailableError,
)
"""Errors that come back until somebody changes a setting, a credential or what is installed."""


def exit_code_of(error: BaseException) -> int | None:
    """The exit code of a process that an exception ends; None where the interpreter's own (1) says enough.

    Whether the error is retryable comes first: a name that another process still holds is a ConfigError, but a retry helps.
    Errors raised together, as by asyncio.TaskGroup, have a code if it is the same for all.
    """
    if isinstance(error, BaseExceptionGroup):
        codes = set(map(exit_code_of, error.exceptions))
        return codes.pop() if len(codes) == 1 else None
    if isinstance(error, FerroError) and error.retryable:
        return EXIT_RETRY
    return EXIT_CONFIG if isinstance(error, CONFIGURATION_ERRORS) else None
