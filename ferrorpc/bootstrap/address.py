"""The address a worker tells the others: where it listens, seen from where they are."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

from ferrorpc.errors import ConfigError, CoordinatorUnavailableError
from ferrorpc.wire.address import is_loopback, is_wildcard, split_address
from ferrorpc.wire.tls import TlsFiles

_RETRY_SECONDS: Final = 0.25
_TELL_SECONDS: Final = 5.0
_TELL_FACTOR: Final = 3.0
_log = logging.getLogger("ferrorpc.bootstrap")


def advertised_host(coordinator: str, config: Mapping[str, Any]) -> str:
    """The host that peers dial: the setting `advertise`, else a specific `bind`, else this machine's address on the way to
    the coordinator, which every peer has in common.

    Raises:
        ConfigError: it listens on loopback, but the coordinator is elsewhere, and so may peers be.
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
    return route if is_wildcard(bind) else bind


def require_private(config: Mapping[str, Any], tls: TlsFiles | None) -> None:
    """Refuses to listen where others reach this worker unless they have to prove who they are.

    Raises:
        ConfigError: the setting `bind` is beyond loopback, without certificates and without `insecure`.
    """
    if config["insecure"] or is_loopback(config["bind"]) or (tls is not None and tls.mutual):
        return
    raise ConfigError(
        f"FERRORPC_BIND={config['bind']} without TLS would let anyone who reaches this worker read and change its tensors",
        hint="set FERRORPC_TLS_CA, _CERT and _KEY (`ferrorpc certs init`), or FERRORPC_INSECURE=1 on a network you trust",
    )


def local_address_towards(address: str, timeout: float) -> str:
    """This machine's own address on the route to `address`. Nothing is sent, except to resolve its name.

    A name may not be known yet when a pod or container starts, so resolving it is repeated for `timeout` seconds.
    """
    host, port = split_address(address)
    began = time.monotonic()
    tell_after = _TELL_SECONDS
    while True:
        try:
            return _route(host, port)
        except OSError as error:
            waited = time.monotonic() - began
            if waited >= tell_after:
                _log.warning("the coordinator's address %s has led nowhere for %.0f s: %s", address, waited, error)
                tell_after *= _TELL_FACTOR
            if waited >= timeout:
                raise CoordinatorUnavailableError(
                    f"the coordinator's address {address} led nowhere for {timeout:g} s: {error}"
                ) from None
        time.sleep(_RETRY_SECONDS)


def _route(host: str, port: int) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
