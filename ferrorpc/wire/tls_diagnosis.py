"""Finds out why a TLS connection fails. gRPC only says "Socket closed"; a handshake with Python's ssl shows the cause."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from ferrorpc.errors import AuthenticationError, FerroError
from ferrorpc.wire.address import split_address
from ferrorpc.wire.identity import Role, server_name
from ferrorpc.wire.tls import NOT_YET_VALID, TlsFiles

SECONDS: Final = 2.0
_REFUSED_HINT: Final = (
    "have both certificates issued by the authority that FERRORPC_TLS_CA names on both sides, and compare the clocks; "
    "the log of the other side says why"
)
_OTHER_HINT: Final = (
    "check the address, and that its certificate is of the authority in FERRORPC_TLS_CA and issued for this job"
)
_OTHER_NAME_HINT: Final = (
    "issue its certificate with this host's name (`ferrorpc certs issue DIRECTORY coordinator --host NAME`), dial a name that "
    "it has, or set FERRORPC_TLS_CERT and FERRORPC_TLS_KEY here: then the job's name counts, not the host's"
)
_NOT_NOW: Final = (NOT_YET_VALID, 10)
"""OpenSSL's codes for a certificate that is not valid yet, or has expired."""
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's codes for a certificate that is valid, but for another host name or address."""


def diagnose(address: str, tls: TlsFiles | None, job: str, role: Role) -> FerroError | None:
    """Why TLS prevents a connection to `address`; None where it does not, or where nobody answers there."""
    if tls is None:
        return _speaks_tls(address)
    try:
        tls.check(listening=False)
        context = ssl.create_default_context(cafile=tls.authority)
        if tls.certificate is not None:
            tls.load_into(context)
        context.set_alpn_protocols(["h2"])
        context.verify_flags = (context.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN) & ~ssl.VERIFY_X509_STRICT  # as gRPC
    except FerroError as error:
        return error
    except OSError:
        return None
    name = server_name(job, role) if tls.mutual else split_address(address)[0]
    try:
        # Twice, because a server that is just stopping closes the connection too; the second dial then fails.
        return _try(address, context, name, tls) and _try(address, context, name, tls)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_NOW:
            return AuthenticationError(
                f"the certificate of who listens at {address} does not hold now: {error.verify_message}",
                hint=f"renew it there (`ferrorpc certs issue DIRECTORY {role}`); if it is new, compare the clocks",
                retryable=error.verify_code == NOT_YET_VALID,
            )
        return AuthenticationError(
            f"who listens at {address} is not the {role} of job {job!r}: {error.verify_message}",
            hint=_OTHER_NAME_HINT if error.verify_code in _OTHER_NAME and not tls.mutual else _OTHER_HINT,
        )
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return AuthenticationError(
                f"who listens at {address} does not speak TLS", hint="give it FERRORPC_TLS_*, or unset them here"
            )
        return AuthenticationError(f"{address} refused the handshake: {error.reason}", hint=_REFUSED_HINT)
    except OSError:
        return None


def _try(address: str, context: ssl.SSLContext, name: str, tls: TlsFiles) -> FerroError | None:
    """Dials once. With TLS 1.3 a certificate is refused after the handshake, so it counts whether the server then speaks."""
    with _dial(address) as plain, context.wrap_socket(plain, server_hostname=name) as connection:
        try:
            spoke = connection.recv(1)
        except ConnectionError:
            spoke = b""
    if spoke:
        return None
    if tls.certificate is None:
        return AuthenticationError(
            f"{address} wants a certificate and this process has none",
            hint="set FERRORPC_TLS_CERT and FERRORPC_TLS_KEY (`ferrorpc certs init`)",
        )
    return AuthenticationError(f"{address} did not accept the certificate {tls.certificate}", hint=_REFUSED_HINT)


def _speaks_tls(address: str) -> FerroError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with _dial(address) as plain, context.wrap_socket(plain):
            pass
    except OSError:
        return None
    return AuthenticationError(
        f"{address} speaks TLS and this process does not", hint="set FERRORPC_TLS_CA, FERRORPC_TLS_CERT and FERRORPC_TLS_KEY"
    )


def _dial(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), SECONDS)
