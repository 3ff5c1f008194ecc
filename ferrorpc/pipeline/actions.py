"""Actions: the single steps of a pipeline's ranks, and their notation.

2F0        stage 2, forward of microbatch 0
1B3        stage 1, the whole backward of microbatch 3
0I2  0W2   a backward in two parts: the gradient of the stage's input, and later those of its weights
3SEND_F1   stage 3 sends its output of microbatch 1; stage 4 receives it with 4RECV_F1
3SEND_B1   stage 3 sends the gradient of its input; stage 2 receives it with 2RECV_B1
"""

from __future__ import annotations

import re
from enum import StrEnum, unique
from typing import NamedTuple

from ferrorpc.errors import UsageError


@unique
class Kind(StrEnum):
    """The kind of an action; the value is its notation."""

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
        """Whether the stage computes; otherwise it is a message."""
        return self in _COMPUTES

    @property
    def sends(self) -> bool:
        """Whether it sends a message."""
        return self in _SENDS


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
"""The names in the literature."""

_COMPUTES = frozenset({F, B, I, W})
_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
_TEXT = re.compile(r"(\d{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,9})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action. `stage` is the number of a piece of the whole model, counted from its input."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def action(text: str) -> Action:
    """Parses the notation of an action.

    Raises:
        UsageError: the text is not an action.
    """
    match = _TEXT.fullmatch(str(text).strip())
    if match is None:
        raise UsageError(
            f"{text!r} is no action", hint="write stage, kind and microbatch, such as 2F0, 1B3, 0I2, 0W2 or 3SEND_F1"
        )
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def actions_of_cell(text: str) -> list[Action]:
    """Parses one cell of a schedule's CSV: no action where it is empty, two where a forward and a backward overlap.

    Raises:
        UsageError: the text is not a cell of a schedule.
    """
    if not text.strip():
        return []
    overlapped = _OVERLAPPED.fullmatch(text.strip())
    return [action(text)] if overlapped is None else [action(part) for part in overlapped[1].split(";")]
