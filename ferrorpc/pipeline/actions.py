"""Actions: what a rank of a pipeline does, one at a time, and how it is written down.

2F0        stage 2, forward of microbatch 0
1B3        stage 1, the whole backward of microbatch 3
0I2  0W2   the same in two: the gradient of the stage's input, and later that of its weights
3SEND_F1   stage 3 sends its output of microbatch 1 on; 4RECV_F1 is its counterpart
3SEND_B1   stage 3 sends the gradient of its input back; 2RECV_B1 is its counterpart
"""

from __future__ import annotations

import re
from enum import StrEnum, unique
from typing import NamedTuple

from ferrorpc.errors import UsageError


@unique
class Kind(StrEnum):
    """What is done; the value is what stands in an action's text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"

    @property
    def computes(self) -> bool:
        """Whether it is work of the stage, not a message."""
        return self in _COMPUTES

    @property
    def sends(self) -> bool:
        """Whether it is the sending end of a message."""
        return self in _SENDS


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
"""As the literature calls them."""

_COMPUTES = frozenset({F, B, I, W})
_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action. `stage` counts the stages of the whole model, from its input on."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def action(text: str) -> Action:
    """The action that is written so.

    Raises:
        UsageError: nothing is written so.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is no action", hint="write stage, kind and microbatch, such as 2F0, 1B3, 0I2, 0W2 or 3SEND_F1"
        )
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def actions_of_cell(text: str) -> list[Action]:
    """The actions of one cell of a table: none where it is empty, two where a forward and a backward overlap.

    Raises:
        UsageError: it is no cell of a schedule.
    """
    if not text.strip():
        return []
    overlapped = _OVERLAPPED.fullmatch(text.strip())
    return [action(text)] if overlapped is None else [action(part) for part in overlapped[1].split(";")]
