"""The states of members, as the words that status, metrics and messages show."""

from __future__ import annotations

from typing import Final

from ferrorpc.v1.identity_pb2 import MemberState

_NAMES: Final[dict[int, str]] = {state: name.removeprefix("MEMBER_STATE_").lower() for name, state in MemberState.items()}


def state_name(state: int) -> str:
    """A member's state as a word; "unknown" for one that only a newer coordinator knows."""
    return _NAMES.get(state, "unknown")
