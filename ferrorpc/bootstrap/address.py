"""The address that a worker advertises to its peers."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

from ferrorpc.errors import ConfigError, CoordinatorUnavailableError
from ferrorpc.wire.address import is_loopback, is_wildcard, needs_scope, split_address
from ferrorpc.wire.tls import TlsFiles

_RETRY_SECONDS: Final = 0.25
_WARN_SECONDS: Final = 5.0
_WARN_FACTOR: Final = 3.0
_log = logging.getLogger("ferrorpc.bootstrap")


def advertised_host(coordinator: str, config: Mapping[str, Any]) -> str:
    """The host that peers connect to: the setting `advertise`, else a specific `bind`, else this machine's address on the route
    to the coordinator, which every peer can reach.

    Many systems give their own name to a loopback address (Debian: 127.0.1.1). So on the coordinator's host that route may be
    of loopback although others reach the host by this name; then it is the name itself.

    Raises:
        ConfigError: this worker listens on loopback only, but the coordinator, and so perhaps peers, are on another machine; or
            the route starts at a link-local IPv6 address.
        CoordinatorUnavailableError: the coordinator's name could not be resolved within `timeout` seconds.
    """
    if config["advertise"]:
        return str(config["advertise"])
    bind = str(config["bind"])
    route = local_address_towards(coordinator, config["timeout"])
    if is_loopback(bind) and not is_loopback(route):
        raise ConfigError(
            f"FERRORPC_BIND={bind} listens for this machine only, but the coordinator {coordinator} is reached over {route}",
            hint="set FERRORPC_BIND=0.0.0.0, or FERRORPC_ADVERTISE to the host that peers reach this worker by",
        )
    if not is_wildcard(bind):
        return bind
    if needs_scope(route):
        raise ConfigError(
            f"the coordinator {coordinator} is reached from {route}, a link-local address that peers cannot dial without the "
            "name of their own interface",
            hint="set FERRORPC_ADVERTISE to the host that peers reach this worker by, or FERRORPC_COORDINATOR to an address of "
            "the coordinator that is not link-local",
        )
    host, _ = split_address(coordinator)
    return host if is_loopback(route) and not is_loopback(host) else route


def host_may_change(config: Mapping[str, Any]) -> bool:
    """Whether `advertised_host` is this machine's address on a route, which a change of its network changes."""
    return not config["advertise"] and is_wildcard(str(config["bind"]))


def require_authentication(config: Mapping[str, Any], tls: TlsFiles | None) -> None:
    """Refuses to listen beyond loopback without authentication.

    Raises:
        ConfigError: `bind` is not a loopback address, and there are neither certificates nor `insecure`.
    """
    if config["insecure"] or is_loopback(config["bind"]) or (tls is not None and tls.mutual):
        return
    raise ConfigError(
        f"FERRORPC_BIND={config['bind']} without TLS would let anyone who reaches this worker read and change its tensors",
        hint="set FERRORPC_TLS_CA, _CERT and _KEY (`ferrorpc certs init`), or FERRORPC_INSECURE=1 on a network you trust",
    )


def local_address_towards(address: str, timeout: float) -> str:
    """This machine's own address on the route to `address`. Nothing is sent, except to resolve the name.

    When a pod or container starts, the name may not be known yet, so resolving is retried for `timeout` seconds; 0: once.
    """
    host, port = split_address(address)
    began = time.monotonic()
    warn_after = _WARN_SECONDS
    while True:
        try:
            return _route(host, port)
        except OSError as error:
            waited = time.monotonic() - began
            if waited >= warn_after:
                _log.warning("the coordinator's address %s has led nowhere for %.0f s: %s", address, waited, error)
                warn_after *= _WARN_FACTOR
            if waited >= timeout:
                how_long = f" for {timeout:g} s" if timeout else ""
                raise CoordinatorUnavailableError(
                    f"the coordinator's address {address} led nowhere{how_long}: {error}"
                ) from None
        time.sleep(_RETRY_SECONDS)


def _route(host: str, port: int) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
