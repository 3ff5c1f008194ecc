"""Actions and their notation."""

from __future__ import annotations

import pytest

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import Action, Kind, action, actions_of_cell


@pytest.mark.parametrize("kind", Kind)
def test_what_is_written_is_read(kind: Kind):
    each = Action(12, kind, 34)
    assert action(str(each)) == each


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("1B3", Action(1, Kind.BACKWARD, 3)),
        ("0I2", Action(0, Kind.BACKWARD_INPUT, 2)),
        ("0W2", Action(0, Kind.BACKWARD_WEIGHT, 2)),
        ("3SEND_F1", Action(3, Kind.SEND_FORWARD, 1)),
        ("2RECV_B1", Action(2, Kind.RECV_BACKWARD, 1)),
    ],
)
def test_the_text_of_each_kind(text: str, each: Action):
    assert action(text) == each
    assert str(each) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 2F1", "2UNSHARD", "-1F0", "2f0", "0F" + "1" * 5000, None, b"2F0"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match="is no action"):
        action(text)


def test_a_cell_may_be_empty_or_hold_an_overlapped_pair():
    assert actions_of_cell(" ") == []
    assert actions_of_cell("(0F7;7B3)OVERLAP_F_B") == [action("0F7"), action("7B3")]
