"""Addresses, host:port, as people write them and as sockets want them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from typing import Any

from ferrorpc.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """host:port as host and port, an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """host:port; an IPv6 host gets its brackets, if it has none."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host. Names are not looked up."""
    address = _numeric(host)
    return address.is_loopback if address is not None else host == "localhost" or host.endswith(".localhost")


def needs_scope(host: str) -> bool:
    """Whether it is a link-local IPv6 address, which other machines can only dial together with an interface of their own."""
    address = _numeric(host)
    return address is not None and address.version == 6 and address.is_link_local


def is_wildcard(host: str) -> bool:
    """Whether listening there is listening on every address."""
    address = _numeric(host)
    return address is not None and address.is_unspecified


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The host as an address; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_taken(host: str, port: int) -> bool:
    """Whether a socket is bound to this port of any of the host's addresses. Other problems of the host are no reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_bound(family, address) for family, _, _, _, address in found)


def _is_bound(family: socket.AddressFamily, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Opens a port for TCP. Like gRPC, a wildcard address of either family listens on both, which pods without IPv4 need.

    Raises:
        OSError: the port is taken, or the host is not an address of this machine.
    """
    if is_wildcard(host) and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    try:
        host.encode("idna")  # else create_server would raise TypeError, and not close its socket
    except UnicodeError:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)) from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def cannot_listen(host: str, error: OSError, hint: str = "set FERRORPC_BIND to an address of this machine") -> ConfigError:
    """What to raise where any free port of this host was asked for, in vain. The hint is not for what is used up."""
    if error.errno == errno.EADDRINUSE:
        others = "start it again when others have ended, or allow more ports (net.ipv4.ip_local_port_range)"
        return ConfigError(f"{host}: every port is in use", hint=others, retryable=True)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "allow more descriptors (ulimit -n)"
    why = "it is no address of this machine" if error.errno == errno.EADDRNOTAVAIL else error.strerror
    return ConfigError(f"cannot listen on {host}: {why}", hint=hint)
