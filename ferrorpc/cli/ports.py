"""Loopback ports that a parent chooses and that its children listen on.

A port that was only found free may be somebody else's a second later: of a server that asks for any port, or of an outgoing
connection. A socket that is bound to it and does not listen keeps it. The kernel gives such a port to nobody who asks for any,
while a server that asks for it by its number can listen, if it sets SO_REUSEADDR as gRPC, libuv and asyncio do.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import cannot_listen

LOOPBACK: Final = "127.0.0.1"


@contextlib.contextmanager
def held_ports(*numbers: int) -> Iterator[list[int]]:
    """Keeps loopback ports for servers that ask for them by number. Yields the numbers.

    Args:
        numbers: 0 stands for any free port.

    Raises:
        ConfigError: this machine has no loopback address, as in some sandboxes, or somebody has the port.
    """
    with contextlib.ExitStack() as stack:
        yield [_bind(stack.enter_context(socket.socket()), number) for number in numbers]


def free_port(*besides: int) -> int:
    """A loopback port that nobody has now, other than these.

    Raises:
        ConfigError: this machine has no loopback address, or no ports are left.
    """
    with held_ports(*[0] * (len(besides) + 1)) as ports:  # asked again, the kernel may offer a port that was given back
        return next(port for port in ports if port not in besides)


def _bind(holder: socket.socket, number: int) -> int:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((LOOPBACK, number))
        with socket.socket(type=socket.SOCK_DGRAM) as route:
            route.connect(holder.getsockname())  # sends nothing, but fails if the interface is down
    except OSError as error:
        if number and error.errno == errno.EADDRINUSE:
            what = f"{LOOPBACK}: somebody has just taken port {number}"
            raise ConfigError(what, hint="start it again", retryable=True) from None
        hint = "bring the loopback interface up (ip link set lo up), with its IPv4 address"
        raise cannot_listen(LOOPBACK, error, hint) from None
    return int(holder.getsockname()[1])
