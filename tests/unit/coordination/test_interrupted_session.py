"""Ctrl-C within what a session does for its rank: who calls again ends what the first call began."""

from __future__ import annotations

import itertools
from functools import partial

from ferrorpc.errors import GroupAbortedError
from tests.interrupts import was_struck
from tests.unit.coordination.test_session import Played
from tests.waiting import eventually

SESSION = ("coordination/session.py", "coordination/connection.py", "coordination/pending_requests.py")


def joined() -> Played:
    played = Played()
    played.welcome()
    played.join(2)
    return played


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
