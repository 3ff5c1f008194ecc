"""A rank of an in-process world gets what was sent to it before it joined, before all that is sent to it meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.inproc import InprocTransport, Network
from ferrorpc.transports.mailbox import Mailbox


def test_what_is_sent_while_a_rank_joins_comes_after_what_was_sent_before() -> None:
    """A rank that reforms a little later than its peer."""
    network = Network(SYSTEM_CLOCK, None, 0)
    taken: list[int] = []

    def send_another(end: InprocTransport) -> None:
        peer = threading.Thread(target=network.arrive, args=(1, lambda end: taken.append(3)))
        peer.start()
        peer.join(5.0)
        taken.append(1)

    network.arrive(1, send_another)
    network.arrive(1, lambda end: taken.append(2))
    lost: list[Any] = []
    mailbox = Mailbox(1, lost.append)
    end = InprocTransport(1, 2, network, mailbox, Latch(), lambda peer, reason: lost.append(reason))
    network.arrive(1, lambda end: taken.append(4))
    assert (taken, lost) == ([1, 2, 3, 4], [])
    end.close(1.0)
