"""The line to the coordinator: nobody waits for an answer that cannot come."""

from typing import Any

import pytest

from ferrorpc.coordination import link as module
from ferrorpc.coordination.link import Link
from ferrorpc.errors import AuthenticationError, CoordinatorUnavailableError
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.v1 import store_pb2


def line() -> Link:
    nobody: Any = None
    return Link("nowhere:1", nobody, nobody, SYSTEM_CLOCK, patience=1.0, max_outage=1.0, heartbeat_interval=1.0)


def test_a_request_on_a_line_that_is_over_is_refused() -> None:
    over = line()
    over.close(AuthenticationError("the token is not one of this coordinator"))
    with pytest.raises(AuthenticationError, match="the token"):
        over.post("a set", store=store_pb2.StoreRequest())


def test_so_is_one_that_is_made_while_the_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait have been told by then: this one would wait for ever."""
    ending = line()

    def ends_meanwhile(label: str, **body: Any) -> None:
        ending.close(AuthenticationError("the token is not one of this coordinator"))

    monkeypatch.setattr(module, "check_size", ends_meanwhile)
    with pytest.raises(AuthenticationError, match="the token"):
        ending.ask("a set", 0.1, CoordinatorUnavailableError)
