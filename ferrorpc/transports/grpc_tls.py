"""TLS between peers: each proves with a certificate of the job's authority that it belongs to the job, in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """What a rank needs, as the contents of PEM files. The certificate names the host that the rank is advertised by."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For listening: whoever dials must have a certificate of the authority."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For dialling."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
