"""Errors keep their class, facts and hint, also across the wire and between threads."""

import copy
import pickle
from collections.abc import Callable

import pytest

from ferrorpc import errors
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveTimeoutError,
    ErrorCode,
    FerroError,
    RendezvousTimeoutError,
    type_of,
)


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
def test_every_code_has_one_class_and_comes_back_as_it(code: ErrorCode) -> None:
    cls = type_of[code]
    assert cls.code is code
    error = FerroError.restore(code, "who and what", "a hint", True, {"rank": 3})
    assert type(error) is cls
    assert (error.message, error.hint, error.retryable, error.fields) == ("who and what", "a hint", True, {"rank": 3})
    assert str(error).splitlines()[-1] == "try: a hint"


@pytest.mark.parametrize("cls", type_of.values(), ids=lambda cls: cls.__name__)
def test_every_class_says_what_to_try(cls: type[FerroError]) -> None:
    assert cls.default_hint


def test_an_unknown_code_from_a_newer_peer_is_still_an_error() -> None:
    assert type(FerroError.restore(999, "new", "", False, {})) is FerroError


def test_the_face_of_each_structured_error() -> None:
    assert errors.PeerLostError(2, "exit 1").rank == 2
    assert errors.PeerLostError(2, "exit 1").reason == "exit 1"
    assert errors.GroupAbortedError(1, "nan").cause == "nan"
    assert errors.CollectiveMismatchError({0: "a", 1: "b"}).signatures == {0: "a", 1: "b"}
    assert errors.CollectiveTimeoutError([3, 1], "late").waiting_on == [1, 3]
    assert errors.BarrierTimeoutError([3], "late").missing == [3]
    assert errors.RendezvousTimeoutError(["b-1"], "late").missing == ["b-1"]
    assert errors.BackendUnavailableError("no GPU", "add one").hint == "add one"


def test_timeouts_are_also_builtin_timeouts_and_config_errors_value_errors() -> None:
    for cls in (
        errors.RendezvousTimeoutError,
        errors.BarrierTimeoutError,
        errors.StoreTimeoutError,
        errors.CollectiveTimeoutError,
    ):
        assert issubclass(cls, TimeoutError)
    assert issubclass(errors.ConfigError, ValueError)


def test_a_copy_shares_no_traceback() -> None:
    error = errors.PeerLostError(1, "gone")
    with pytest.raises(errors.PeerLostError):
        raise error
    assert error.__traceback__ is not None
    assert error.again().__traceback__ is None


def test_errors_survive_multiprocessing() -> None:
    error = pickle.loads(pickle.dumps(errors.CollectiveMismatchError({0: "a", 1: "b"})))
    assert error.signatures == {0: "a", 1: "b"}


def test_facts_that_did_not_come_along_are_told_as_unknown() -> None:
    for code in (errors.ErrorCode.PEER_LOST, errors.ErrorCode.GROUP_ABORTED, errors.ErrorCode.BACKEND_UNAVAILABLE):
        error = errors.FerroError.restore(code, "what is known", "", False, {})
        assert getattr(error, "rank", -1) == -1
        assert "what is known" in (getattr(error, "reason", ""), getattr(error, "cause", ""))


ODD = [7, -1, 1 << 62, 0.5, float("inf"), "zz", "", True, None, [], ["a", 1.5], [1, "2"], {3: "x"}, {}]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_fact_of_another_type_than_it_should_be_is_left_out(value: object) -> None:
    """Another process may have reported anything; whoever handles the error must not get another one from it."""
    names = ("rank", "group_rank", "missing", "waiting_on", "signatures", "reason", "cause")
    for code, cls in type_of.items():
        error = FerroError.restore(code, "m", "h", False, dict.fromkeys(names, value))
        for name in set(names) & set(dir(cls)):
            getattr(error, name)
    lost = FerroError.restore(ErrorCode.PEER_LOST, "m", "h", False, {"rank": value})
    assert isinstance(lost, errors.PeerLostError)
    assert lost.rank == (value if isinstance(value, int) else -1)
    late = FerroError.restore(ErrorCode.BARRIER_TIMEOUT, "m", "h", False, {"missing": value})
    assert isinstance(late, BarrierTimeoutError)
    assert late.missing == ([1] if value == [1, "2"] else [])


def test_a_structured_error_says_what_it_knows_without_a_message() -> None:
    assert str(RendezvousTimeoutError(missing=["rank 2"])).startswith("these did not come in time: ['rank 2']\ntry: ")
    assert str(BarrierTimeoutError(missing=[2, 1])).startswith("ranks [1, 2] did not come in time\ntry: ")
    assert str(CollectiveTimeoutError(waiting_on=[3])).startswith("ranks [3] did not come in time\ntry: ")
    assert BarrierTimeoutError(missing=[1]).waiting_on == [1]


class DataLost(errors.PeerLostError):
    """A caller's own error."""

    def __init__(self, shard: int) -> None:
        super().__init__(0, f"shard {shard}")
        self.shard = shard


class OtherLost(errors.PeerLostError):
    """Another one, with the same code."""


def test_a_callers_own_error_takes_no_ones_place() -> None:
    """It replaced its base wherever that came from another rank, so that the wrong `except` caught it."""
    received = FerroError.restore(ErrorCode.PEER_LOST, "m", "h", False, {"rank": 3})
    assert type(received) is errors.PeerLostError
    assert type(pickle.loads(pickle.dumps(received))) is errors.PeerLostError


def pickled(error: FerroError) -> FerroError:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("copied", [FerroError.again, copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_callers_own_error_is_one_too(copied: Callable[[FerroError], FerroError]) -> None:
    error = DataLost(7)
    error.add_note("seen in epoch 2")
    found = copied(error)
    assert isinstance(found, DataLost)
    assert (found.shard, found.__notes__, str(found), found.rank) == (7, ["seen in epoch 2"], str(error), 0)
    found.again().add_note("only of the copy")
    assert found.__notes__ == ["seen in epoch 2"]


@pytest.mark.parametrize("copied", [FerroError.again, copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("code", ErrorCode)
def test_a_copy_says_what_its_original_says(code: ErrorCode, copied: Callable[[FerroError], FerroError]) -> None:
    """Those that are a TimeoutError, too, had no text any more."""
    error = FerroError.restore(code, "what happened", "what to try", True, {"missing": [1, 2]})
    error.add_note("in epoch 2")
    found = copied(error)
    assert (type(found), str(found), found.args, vars(found)) == (type(error), str(error), error.args, vars(error))
