"""What each rank raises of one cause."""

from __future__ import annotations

import pytest

from ferrorpc.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    LimitExceededError,
    PeerLostError,
)
from ferrorpc.generation_errors import ended_by, error_on_rank, reason_of

UNNAMED = [LimitExceededError("no memory"), BackendUnavailableError("the GPU has failed", "restart"), FerroError("a bug")]


@pytest.mark.parametrize("cause", UNNAMED)
def test_what_does_not_say_whose_it_is_names_that_rank_on_the_others(cause: FerroError) -> None:
    assert error_on_rank(1, 1, cause) is cause
    there = error_on_rank(0, 1, cause)
    assert type(there) is type(cause)
    assert there.message == f"rank 1 ended the group: {cause.message}"
    assert there.fields == {**cause.fields, "rank": 1}
    assert (there.hint, there.retryable) == (cause.hint, cause.retryable)
    assert error_on_rank(0, 1, there) is there


@pytest.mark.parametrize(
    "cause", [PeerLostError(2, "killed"), GroupAbortedError(1, "enough"), CollectiveMismatchError(signatures={0: "a", 1: "b"})]
)
def test_what_names_ranks_already_is_the_same_everywhere(cause: FerroError) -> None:
    assert [error_on_rank(rank, 1, cause) for rank in range(3)] == [cause] * 3


@pytest.mark.parametrize("cause", UNNAMED)
def test_what_the_coordinator_says_is_nobodys(cause: FerroError) -> None:
    assert error_on_rank(0, -1, cause) is cause


def test_only_the_rank_whose_deadline_passed_has_timed_out() -> None:
    cause = CollectiveTimeoutError([0], "too late")
    assert error_on_rank(1, 1, cause) is cause
    there = error_on_rank(0, 1, cause)
    assert isinstance(there, GroupAbortedError)
    assert there.fields["rank"] == 1
    assert "too late" in there.message


def test_a_reason_is_one_line() -> None:
    assert reason_of(ValueError("first\nsecond")) == "ValueError: first"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert reason_of(ExceptionGroup("tasks", [ExceptionGroup("more", [KeyError("first")]), OSError()])) == "KeyError: 'first'"


def test_an_exception_that_cannot_say_what_it_is_has_a_reason() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert reason_of(Silent()) == "Silent"


def test_who_ended_the_generation_without_knowing_its_rank_is_named_there_too() -> None:
    for rank in range(2):
        told = error_on_rank(rank, 1, ended_by("ValueError: no"))
        assert isinstance(told, GroupAbortedError)
        assert (told.rank, told.cause, told.message) == (1, "ValueError: no", "rank 1 ended the group: ValueError: no")
        assert told.retryable
