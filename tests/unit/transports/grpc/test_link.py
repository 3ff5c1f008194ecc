"""What a rank knows of its link to one peer."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc.transports.grpc.link import LATE_STREAM_SECONDS, Link

STREAM: Any = object()


def test_a_peer_that_said_goodbye_may_still_open_its_stream_for_a_while() -> None:
    link = Link()
    link.leave(10.0)
    assert link.may_bring_more(10.0 + LATE_STREAM_SECONDS / 2)
    assert not link.may_bring_more(10.0 + LATE_STREAM_SECONDS)
    link.incoming[0] = STREAM
    assert link.may_bring_more(10.0 + LATE_STREAM_SECONDS)


@pytest.mark.parametrize("heard", ["goodbye", "stream"])
def test_who_has_said_anything_is_reached(heard: str) -> None:
    link = Link()
    assert not link.is_reached
    if heard == "goodbye":
        link.leave(0.0)
    else:
        link.incoming[0] = STREAM
    assert link.is_reached


def test_the_first_goodbye_counts() -> None:
    link = Link()
    link.leave(1.0)
    link.leave(2.0)
    assert link.left_at == 1.0
