"""Ctrl-C within what a session does for its rank: who calls again ends what the first call began."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from ferrorpc import ProcessGroup
from ferrorpc.coordination import connection, session as session_module
from ferrorpc.errors import FerroError, GroupAbortedError
from ferrorpc.testing import run_world
from ferrorpc.v1.barrier_pb2 import BarrierResponse
from tests.interrupts import was_struck
from tests.unit.coordination.test_session import joined
from tests.waiting import eventually

SESSION = ("coordination/session.py", "coordination/connection.py", "coordination/pending_requests.py")


def answers_no_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "LEAVE_SECONDS", 0.0)
    monkeypatch.setattr(session_module, "LEAVE_WHILE_UP_SECONDS", 0.0)


def test_wherever_the_end_of_a_generation_is_interrupted_a_second_one_ends_it() -> None:
    ended = []
    for place in itertools.count(1):
        played = joined()
        latch = played.session.membership.latch
        if not was_struck(place, partial(latch.end, GroupAbortedError(0, "the first")), (*SESSION, "ferrorpc/guard.py")):
            break
        latch.end(GroupAbortedError(0, "the second"))
        ended.append((played, latch))
    assert place > 10
    for played, latch in ended:
        assert eventually(lambda: played.streams[0] or latch.cause)  # noqa: B023  called at once


def test_wherever_a_barrier_is_interrupted_its_next_use_has_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in itertools.count(1):
        played = joined()
        monkeypatch.setattr(played.connection, "ask", lambda *_, **__: BarrierResponse())
        barrier, ordinals = partial(played.session.barrier, "epoch"), played.session.membership.ordinals
        for _ in range(3):
            barrier()
        if not was_struck(place, barrier, ("coordination/session.py", "coordination/ordinals.py")):
            break
        assert ordinals.next("epoch", (0, 1)) == 4, place
    assert place > 10


def test_wherever_a_barrier_of_a_local_world_is_interrupted_the_next_call_has_its_payloads() -> None:
    files = ("coordination/local.py", "coordination/ordinals.py", "coordination/condition.py")

    def body(group: ProcessGroup, place: int) -> tuple[bool, list[bytes]]:
        barrier = partial(group.session.barrier, "epoch", str(group.rank).encode(), timeout=5.0)
        barrier()
        if group.rank == 0 and was_struck(place, barrier, files):
            return True, barrier()
        return False, [b"0", b"1"] if group.rank == 0 else barrier()

    for place in itertools.count(1):
        found = run_world(2, partial(body, place=place))
        assert [payloads for _, payloads in found] == [[b"0", b"1"]] * 2, place
        if not found[0][0]:
            break
    assert place > 20


def test_wherever_a_leave_is_interrupted_a_second_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_no_leave(monkeypatch)
    for place in itertools.count(1):
        played, closed = joined(), set[int]()
        for number in range(2):
            played.session.on_leave(partial(closed.add, number))
        struck = was_struck(place, played.session.leave, (*SESSION, "coordination/process_exit.py"))
        played.session.leave()
        assert played.connection.ended_by is not None, place
        assert played.session.membership.latch.cause is not None, place
        assert closed == {0, 1}, place
        if not struck:
            break
    assert place > 20


def test_a_leave_within_a_leave_does_nothing_and_a_callback_that_fails_keeps_nothing_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers_no_leave(monkeypatch)
    played, called = joined(), list[str]()
    session = played.session

    def fails() -> None:
        called.append("fails")
        session.leave("terminated")  # as a signal handler may
        assert played.connection.ended_by is None
        raise RuntimeError("a bug in a callback")

    session.on_leave(lambda: called.append("other"))
    session.on_leave(fails)
    with pytest.raises(RuntimeError, match="a bug in a callback"):
        session.leave()
    session.leave()
    assert called == ["fails", "other"]
    assert played.connection.ended_by is not None


def test_wherever_a_write_is_interrupted_it_gives_back_its_turn_and_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REPLY_MARGIN_SECONDS", 0.0)
    files = (*SESSION, "coordination/remote_store.py", "coordination/condition.py")
    for place in itertools.count(1):
        played = joined()
        played.session.store._timeout = 0.0
        try:
            assert was_struck(place, partial(played.session.store.set, "key", b"value"), files)
        except FerroError:  # nobody answers
            break
        assert not played.session.store._writing, place
        assert not played.connection._requests.to_send(), place
    assert place > 20
