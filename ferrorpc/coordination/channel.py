"""Channels to a coordinator, as the settings ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from ferrorpc.errors import FerroError
from ferrorpc.wire.identity import Role
from ferrorpc.wire.options import session_channel
from ferrorpc.wire.tls import Dialer, TlsFiles
from ferrorpc.wire.tls_diagnosis import diagnose


class Connector:
    """Makes channels to the coordinator of a job, with TLS where the tls_* settings ask for it.

    Files that are renewed are used from the next channel on.

    Raises:
        ConfigError: the tls_* settings contradict each other.
    """

    def __init__(self, address: str, job: str, config: Mapping[str, Any]) -> None:
        self.address = address
        self.job = job
        self.tls = TlsFiles.of(config)
        self._dialer = None if self.tls is None else Dialer(self.tls)

    def __call__(self) -> grpc.Channel:
        """One channel.

        Raises:
            ConfigError: a file of the tls_* settings cannot be read.
            AuthenticationError: this process's certificate has expired, or is not of the authority.
        """
        if self._dialer is None:
            return grpc.insecure_channel(self.address, options=session_channel())
        return self._dialer.channel(self.address, self.job, Role.COORDINATOR, session_channel())

    def diagnose(self) -> FerroError | None:
        """Why TLS does not let a channel come about; None where it is not to blame. Takes up to 2 s."""
        return diagnose(self.address, self.tls, self.job, Role.COORDINATOR)
