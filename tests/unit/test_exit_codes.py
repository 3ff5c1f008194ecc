"""Which errors end a process with a code that tells its launcher to retry, or never to."""

import pytest

from ferrorpc import errors
from ferrorpc.errors import ErrorCode, FerroError, type_of
from ferrorpc.exit_codes import exit_code_of

CONFIGURATION = {"CONFIG", "AUTHENTICATION", "PERMISSION_DENIED", "VERSION_MISMATCH", "BACKEND_UNAVAILABLE"}
RETRY = {"COORDINATOR_UNAVAILABLE", "STALE_GENERATION", "PEER_LOST", "GROUP_ABORTED"}


@pytest.mark.parametrize("code", ErrorCode)
def test_each_error_class_means_bad_configuration_or_a_retry_or_neither(code: ErrorCode) -> None:
    error = FerroError.restore(code, "it failed", "mend it", type_of[code].default_retryable, {})
    assert exit_code_of(error) == (64 if code.name in CONFIGURATION else 75 if code.name in RETRY else None)


def test_an_error_that_is_retryable_itself_asks_for_a_retry_whatever_its_class() -> None:
    assert exit_code_of(errors.ConfigError("the name is held for now", retryable=True)) == 75
    assert exit_code_of(errors.RendezvousTimeoutError([], "the world is full", retryable=True)) == 75
    assert exit_code_of(errors.PeerLostError(1, "it is gone for good", retryable=False)) is None


def test_errors_that_are_raised_together_have_the_code_that_each_of_them_has() -> None:
    """As asyncio.TaskGroup raises them, which wraps a single one, too."""
    lost = errors.PeerLostError(1, "it ended")
    assert exit_code_of(ExceptionGroup("tasks", [lost])) == 75
    assert exit_code_of(ExceptionGroup("tasks", [lost, ExceptionGroup("more", [lost, lost])])) == 75
    assert exit_code_of(ExceptionGroup("tasks", [lost, ValueError("no such file")])) is None


def test_other_exceptions_keep_the_interpreters_code() -> None:
    assert exit_code_of(ValueError("x")) is None
    assert exit_code_of(KeyboardInterrupt()) is None
