"""TLS for all connections, from files that are checked at each dial and each handshake, so that they may be renewed.

Changed files take effect once they are valid together: certificate and key are a pair, issued by the authority, and valid now.
Until then the previous ones stay in use, which is logged once. So the files may be replaced one after the other.

With an authority, a certificate and a key both ends authenticate each other (mutual TLS), and clients verify the server's job
and role (identity.py). With an authority alone a client verifies the host's name, as browsers do, and authenticates with a
token.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import grpc

from ferrorpc.errors import AuthenticationError, ConfigError
from ferrorpc.wire.identity import Identity, Role, identities, server_name
from ferrorpc.wire.options import Options

_log = logging.getLogger("ferrorpc.tls")
Made = TypeVar("Made")
_STEPS_MAX: Final = 8
"""More rounds than a handshake in memory takes."""
_READS_MAX: Final = 5
"""How often files that change while they are read at the start are read again."""
_RENEW_HINT: Final = "renew it with `ferrorpc certs issue`, from the authority that FERRORPC_TLS_CA names"
NOT_YET_VALID: Final = 9
"""OpenSSL's code for a certificate that begins to be valid later, by this host's clock."""
_NO_ISSUER: Final = 20
"""OpenSSL's code for a certificate whose issuer is neither trusted nor in the file."""
_WRONG_PURPOSE: Final = 26
"""OpenSSL's code for a certificate that is valid, but not for the end that shows it."""
_UNKNOWN_TO_GRPC: Final = {
    "Ed25519": bytes.fromhex("300506032b6570032100"),
    "Ed448": bytes.fromhex("300506032b6571033a00"),
    "P-521": bytes.fromhex("06052b81040023"),
}
"""Kinds of keys that OpenSSL takes and BoringSSL, which gRPC uses, does not; as certificates have them in DER."""
_HINTS: Final = {
    NOT_YET_VALID: "set this host's clock, which is behind (chrony, ntpd), or wait until the certificate is valid",
    _NO_ISSUER: "have it issued by an authority in FERRORPC_TLS_CA; an intermediate one's certificate follows in its file",
    _WRONG_PURPOSE: "who listens needs worker.pem or coordinator.pem; those of observers and admins are for commands",
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files, None where not given. A certificate and its key are given together."""

    authority: str | None
    certificate: str | None = None
    key: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TlsFiles | None:
        """The files of the tls_* settings; None where none is set.

        Raises:
            ConfigError: a certificate without its key, or a key without its certificate.
        """
        authority, certificate, key = (config[name] for name in ("tls_ca", "tls_cert", "tls_key"))
        if (certificate is None) != (key is None):
            raise ConfigError(
                "FERRORPC_TLS_CERT and FERRORPC_TLS_KEY belong together; only one of them is given",
                hint="give both or neither; `ferrorpc certs init` makes both",
            )
        return None if authority is None and certificate is None else cls(authority, certificate, key)

    @property
    def mutual(self) -> bool:
        """Whether both ends authenticate each other."""
        return self.authority is not None and self.certificate is not None

    def check(self, *, listening: bool) -> frozenset[Identity]:
        """Checks the files as the other end will, by a handshake in memory. Returns the identities in the certificate.

        Raises:
            ConfigError: a file cannot be read or is no PEM; key and certificate are no pair, or of a kind that gRPC refuses.
            AuthenticationError: the certificate has expired, is not valid yet (retryable), is of another authority or for
                another purpose.
        """
        self._contents()
        if self.certificate is None:
            self._trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        names: Any = self._seen(listening=listening).get("subjectAltName", ())
        return identities(value for kind, value in names if kind == "URI")

    def ends_at(self, *, listening: bool) -> float | None:
        """When the certificate expires, in seconds since the epoch; None without an authority, which is needed to read it.

        Raises:
            ConfigError, AuthenticationError: as `check`.
        """
        end: Any = self._seen(listening=listening).get("notAfter")
        return None if end is None else ssl.cert_time_to_seconds(end)

    def _seen(self, *, listening: bool) -> Mapping[str, Any]:
        """The certificate as the other end sees it; empty where there is no authority to verify it."""
        if self.certificate is None:
            return {}
        near, far = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        far.check_hostname = False
        far.verify_mode = ssl.CERT_NONE
        verifier = far if listening else near
        if self.authority is not None:
            verifier.verify_mode = ssl.CERT_REQUIRED
            self._trust(verifier)
        try:
            self.load_into(near)
            self.load_into(far)
            seen = _handshake(near, far, listening=listening)
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(
                f"the certificate {self.certificate} is not accepted: {error.verify_message}",
                hint=_HINTS.get(error.verify_code, _RENEW_HINT),
                retryable=error.verify_code == NOT_YET_VALID,
            ) from None
        except ssl.SSLError as error:
            raise self._no_pair(error) from None
        except OSError as error:
            raise self._unreadable(error) from None
        encoded = seen.getpeercert(binary_form=True) or b""
        for kind, mark in _UNKNOWN_TO_GRPC.items():
            if mark in encoded:
                text = f"the key of the certificate {self.certificate} is of a kind that gRPC does not take: {kind}"
                raise ConfigError(text, hint="have it issued for a key of ECDSA on P-256 or P-384, or of RSA")
        return seen.getpeercert() or {}

    def _no_pair(self, error: ssl.SSLError) -> ConfigError:
        """What is wrong with certificate or key. OpenSSL gives no reason for files that it cannot parse."""
        hint = "check FERRORPC_TLS_CERT, FERRORPC_TLS_KEY and FERRORPC_TLS_CA; `ferrorpc certs init` makes all three"
        _, certificate, key = self._contents()
        if b"ENCRYPTED" in (key or b""):
            hint = f"write it without one: openssl pkey -in {self.key}, into a file that only its owner can read"
            return ConfigError(f"the key {self.key} has a password", hint=hint)
        if error.reason:
            return ConfigError(f"{self.certificate} and {self.key} are no certificate and its key: {error.reason}", hint=hint)
        if b"-----BEGIN CERTIFICATE" not in (certificate or b""):
            return ConfigError(f"{self.certificate} holds no certificate in PEM", hint=hint)
        return ConfigError(f"{self.certificate} and {self.key} are no certificate and its key in PEM", hint=hint)

    def _trust(self, context: ssl.SSLContext) -> None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: an intermediate authority will do
        try:
            context.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            raise ConfigError(
                f"{self.authority} holds no certificate of an authority: {error.reason or error}",
                hint="check FERRORPC_TLS_CA; `ferrorpc certs init` makes such a file, ca.pem",
            ) from None
        except OSError as error:
            raise self._unreadable(error) from None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for dialling, from the files as they are now. `Dialer` keeps and renews them.

        Raises:
            ConfigError: a file cannot be read, or there is no authority.
        """
        authority, certificate, key = self._contents()
        if authority is None:
            raise ConfigError("a certificate, but no authority to check the other end by", hint="set FERRORPC_TLS_CA")
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server. Clients must have a certificate of the authority, where there is one.

        Raises:
            ConfigError, AuthenticationError: as `check`.
        """
        reloaded = _Reloaded(self, self._configuration, listening=True)
        return grpc.dynamic_ssl_server_credentials(
            reloaded.made,
            reloaded.renewed,  # type: ignore[arg-type]  # None is allowed: nothing has changed
            require_client_authentication=self.authority is not None,
        )

    def server_context(self) -> ssl.SSLContext:
        """Context for a server of browsers and the like, which have no certificate. Renewed in the same way.

        Raises:
            ConfigError, AuthenticationError: as `check`.
        """
        reloaded = _Reloaded(self, self._context, listening=True)

        def renew(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            reloaded.renewed()
            connection.context = reloaded.made

        reloaded.made.sni_callback = renew
        return reloaded.made

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Gives a context the certificate (there must be one) and its key. A key with a password is an error, not a prompt."""
        assert self.certificate is not None
        context.load_cert_chain(self.certificate, self.key, password=lambda: b"")

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes whenever one of the files does. Raises ConfigError where one is missing."""
        try:
            states = [os.stat(path) for path in (self.authority, self.certificate, self.key) if path is not None]
        except OSError as error:
            raise self._unreadable(error) from None
        return tuple((state.st_ino, state.st_mtime_ns, state.st_size) for state in states)

    def _contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        try:
            authority, certificate, key = (
                None if path is None else Path(path).read_bytes() for path in (self.authority, self.certificate, self.key)
            )
        except OSError as error:
            raise self._unreadable(error) from None
        return authority, certificate, key

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        authority, certificate, key = self._contents()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)  # type: ignore[list-item]

    def _unreadable(self, error: OSError) -> ConfigError:
        paths = [path for path in (self.authority, self.certificate, self.key) if path is not None]
        name = error.filename or f"one of {', '.join(paths)}"
        return ConfigError(f"cannot read {name}: {error.strerror}", hint="check FERRORPC_TLS_*")


class _Reloaded(Generic[Made]):
    """Something made from the files, made again whenever they change. Invalid or half-written files leave it as it was.

    Args:
        make: reads the files and makes it.
        listening: whether the files are for a server.

    Raises:
        ConfigError, AuthenticationError: the files are not valid at the start.
    """

    def __init__(self, files: TlsFiles, make: Callable[[], Made], *, listening: bool) -> None:
        self._files = files
        self._make = make
        self._listening = listening
        self._lock = threading.Lock()
        self._told: tuple[object, str] = (), ""
        for _ in range(_READS_MAX):
            found = self._read()
            if found is not None:
                break
        else:
            raise ConfigError(
                f"{files.certificate}, its key and the authority change faster than they can be read",
                hint="start again once they are written",
            )
        self._stamps, self.made = found

    def renewed(self) -> Made | None:
        """Called at each handshake. The new one where the files have changed, else None."""
        with self._lock:
            stamps: tuple[object, ...] = ()
            try:
                stamps = self._files.stamps()
                if stamps == self._stamps:
                    self._told = (), ""
                    return None
                found = self._read()
            except (ConfigError, AuthenticationError) as error:
                self._tell(stamps, error)
                return None
            if found is None:
                return None
            self._stamps, self.made = found
            self._told = (), ""
        _log.warning("%s was read anew", self._files.certificate or self._files.authority)
        return self.made

    def current(self) -> Made:
        """What to dial with, renewed where the files have changed.

        Raises:
            ConfigError, AuthenticationError: the files have not changed, but are not valid any more.
        """
        if self.renewed() is None and self._is_of_these_files():
            try:
                self._files.check(listening=self._listening)
            except (ConfigError, AuthenticationError):
                if self._is_of_these_files():  # unless others are being written right now
                    raise
        return self.made

    def _is_of_these_files(self) -> bool:
        try:
            return self._files.stamps() == self._stamps
        except ConfigError:
            return False

    def _read(self) -> tuple[tuple[object, ...], Made] | None:
        """The stamps of the files and what was made of them; None where the files changed meanwhile."""
        before = self._files.stamps()
        try:
            self._files.check(listening=self._listening)
            made = self._make()
        except (ConfigError, AuthenticationError, OSError):
            if self._files.stamps() == before:
                raise
            return None
        return (before, made) if self._files.stamps() == before else None

    def _tell(self, stamps: object, error: Exception) -> None:
        """Logs an error once for the same files and reason, however many handshakes there are."""
        reason = str(error).partition("\n")[0]
        if (stamps, reason) != self._told:
            self._told = stamps, reason
            _log.warning("the certificate in use is kept, the files do not fit (yet): %s", reason)


class Dialer:
    """Makes channels with the TLS files of this process, which may be renewed."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._reloaded: _Reloaded[grpc.ChannelCredentials] | None = None

    def channel(self, address: str, job: str, role: Role, options: Options) -> grpc.Channel:
        """A channel to a listener that must be the `role` of `job`.

        Raises:
            ConfigError, AuthenticationError: the files were never valid, or are not any more (see `TlsFiles.check`). Where they
                have changed and are not valid yet, the previous ones are used.
        """
        with self._lock:
            if self._reloaded is None:
                self._reloaded = _Reloaded(self.files, self.files.channel_credentials, listening=False)
        named = self.files.mutual
        name: list[tuple[str, Any]] = [("grpc.ssl_target_name_override", server_name(job, role))] if named else []
        return grpc.secure_channel(address, self._reloaded.current(), options=[*options, *name])


def _handshake(near: ssl.SSLContext, far: ssl.SSLContext, *, listening: bool) -> ssl.SSLObject:
    """Does a handshake in memory. Returns the end that has seen the certificate."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = far.wrap_bio(down, up), near.wrap_bio(up, down, server_side=True)
    open_ends = [client, server]
    for _ in range(_STEPS_MAX):
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not open_ends:
            break
    return client if listening else server
