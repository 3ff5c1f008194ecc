"""Ports for servers that are started again at their address."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

_RANGE: Final = range(20_000, 29_000)
"""Below the ports that the kernel gives to sockets that ask for any."""


def lasting_port() -> int:
    """A free port of 127.0.0.1 that no other socket gets by chance while its server is away."""
    while True:
        port = random.SystemRandom().choice(_RANGE)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
