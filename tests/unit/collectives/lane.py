"""A lane whose room the test decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.wire.frames import Header, Key


class Lane(Transport):
    """Has room for `room` chunks; those of the tag 9 never find any."""

    rank, size = 0, 2

    def __init__(self, room: int) -> None:
        self.mailbox = Mailbox(0, lambda error: None)
        self.room = room
        self.gone: list[tuple[int, int]] = []
        """Tag and first byte of each chunk's payload."""
        self.not_reached: dict[int, str] = {}
        self.lost_links: dict[int, str] = {}

    def send(
        self, peer: int, key: Key, header: Header, offset: int, payload: np.ndarray[Any, Any] | None, room: Callable[[], None]
    ) -> bool:
        if not self.room or header.slot == 9:
            return False
        assert payload is not None
        self.room -= 1
        self.gone.append((header.slot, int(payload[0])))
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None: ...

    def probe(self, peer: int, key: Key, signature: str) -> None: ...

    def unreached(self) -> dict[int, str]:
        return self.not_reached

    def lost(self) -> dict[int, str]:
        return self.lost_links

    def close(self, timeout: float) -> None: ...
