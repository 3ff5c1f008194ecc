"""Channels to a coordinator, with TLS as the settings say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from ferrorpc.errors import ConfigError, FerroError
from ferrorpc.wire.address import is_loopback, split_address
from ferrorpc.wire.identity import Role
from ferrorpc.wire.options import session_channel
from ferrorpc.wire.tls import Dialer, TlsFiles
from ferrorpc.wire.tls_diagnosis import diagnose
from ferrorpc.wire.token import Token


def token_for(address: str, config: Mapping[str, Any]) -> Token:
    """The job's token, to be sent to a coordinator.

    Raises:
        ConfigError: it would travel in clear text beyond loopback, or its file cannot be used.
    """
    is_safe = config["insecure"] or TlsFiles.of(config) is not None or is_loopback(split_address(address)[0])
    if config["token_file"] and not is_safe:
        raise ConfigError(
            f"without TLS, whoever is on the way to {address} could read the token of FERRORPC_TOKEN_FILE",
            hint="set FERRORPC_TLS_CA to the coordinator's authority, or FERRORPC_INSECURE=1 on a network you trust",
        )
    return Token(config["token_file"])


class ChannelFactory:
    """Makes channels to the coordinator of a job, with TLS if the tls_* settings ask for it.

    Renewed certificate files are used from the next channel on.

    Raises:
        ConfigError: the tls_* settings contradict each other.
    """

    def __init__(self, address: str, job: str, config: Mapping[str, Any]) -> None:
        self.address = address
        self.job = job
        self.tls = TlsFiles.of(config)
        self._dialer = None if self.tls is None else Dialer(self.tls)

    def __call__(self) -> grpc.Channel:
        """A new channel.

        Raises:
            ConfigError: a file of the tls_* settings cannot be read.
            AuthenticationError: this process's certificate has expired, or another authority signed it.
        """
        if self._dialer is None:
            return grpc.insecure_channel(self.address, options=session_channel())
        return self._dialer.channel(self.address, self.job, Role.COORDINATOR, session_channel())

    def diagnose(self) -> FerroError | None:
        """The TLS error that keeps channels from connecting; None if it is not TLS. Takes up to 2 s."""
        return diagnose(self.address, self.tls, self.job, Role.COORDINATOR)
