"""A certificate authority of a job: it signs certificates that name their holders' jobs and roles.

Keys are ECDSA on P-256. Importing this needs the package `cryptography`.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ferrorpc.errors import ConfigError
from ferrorpc.wire.identity import Identity, Role, identities

BACKDATED: Final = datetime.timedelta(minutes=5)
"""Certificates become valid this long before they are made, because clocks differ."""
_OTHERS_WRITE: Final = 0o022
_LISTENERS: Final = (Role.WORKER, Role.COORDINATOR)


class Authority:
    """Signs certificates."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def make(cls, directory: Path, days: int) -> Authority:
        """A new authority, written to ca.pem and ca.key. Raises ConfigError if either exists already."""
        if found := [name for name in ("ca.pem", "ca.key") if (directory / name).exists()]:
            raise ConfigError(
                f"{directory} has an authority already: {' and '.join(found)}",
                hint="`ferrorpc certs issue` renews certificates where ca.pem and ca.key are; or name another directory",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("ferrorpc authority")
        certificate = _builder(name, name, key, datetime.timedelta(days=days), signs=True).sign(key, hashes.SHA256())
        _write(directory, "ca", certificate, key)
        return cls(certificate, key)

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """The authority of ca.key; ca.pem may hold others beside it, while it is replaced. Raises ConfigError without one."""
        try:
            certificates = x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
            key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{directory} has no authority: {error}", hint="make one with `ferrorpc certs init`") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{directory / 'ca.key'} is not an ECDSA key", hint="make one with `ferrorpc certs init`")
        own = [certificate for certificate in certificates if certificate.public_key() == key.public_key()]
        if not own:
            raise ConfigError(
                f"{directory / 'ca.key'} is not the key of a certificate in {directory / 'ca.pem'}",
                hint="put the two files together that `ferrorpc certs init` made together",
            )
        return cls(max(own, key=lambda certificate: certificate.not_valid_after_utc), key)

    def issue(
        self, role: Role, holders: Sequence[Identity], hosts: Sequence[str], lifetime: datetime.timedelta, directory: Path
    ) -> None:
        """Writes ROLE.pem and ROLE.key.

        Args:
            holders: the identities that the certificate proves, all of this role.
            hosts: names and addresses at which browsers reach a coordinator; ignored for other roles.

        Raises:
            ConfigError: the certificate would outlive the authority.
        """
        ends = self._certificate.not_valid_after_utc
        if datetime.datetime.now(datetime.UTC) + lifetime > ends + BACKDATED:
            raise ConfigError(
                f"a certificate that is valid for {lifetime} would outlive its authority, which ends {ends:%Y-%m-%d %H:%M} UTC",
                hint="give a shorter --lifetime, or make a new authority (`ferrorpc certs init DIRECTORY --days N`)",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(holder.uri) for holder in holders]
        if role in _LISTENERS:
            names += [x509.DNSName(holder.server_name) for holder in holders]
        if role is Role.COORDINATOR:
            names += [_host(host) for host in hosts]
        # The coordinator is also a client: its health probe uses this certificate.
        purposes = [*([ExtendedKeyUsageOID.SERVER_AUTH] if role in _LISTENERS else []), ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(f"ferrorpc {role}"), self._certificate.subject, key, lifetime, signs=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(directory, role, certificate, key)

    @staticmethod
    def names_in(path: Path, role: Role) -> tuple[list[Identity], list[str]] | None:
        """The holders and the hosts that a certificate of this role names; None where the file is no such certificate."""
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (OSError, ValueError, x509.ExtensionNotFound):
            return None
        found = identities(names.get_values_for_type(x509.UniformResourceIdentifier))
        holders = sorted((each for each in found if each.role is role), key=lambda holder: holder.job)
        own = {holder.server_name for holder in holders}
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        return holders, [host for host in hosts if host not in own]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: datetime.timedelta, *, signs: bool
) -> x509.CertificateBuilder:
    """What the certificates of authorities, which sign others, and of their holders have in common."""
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(directory: Path, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Writes both files, each replaced atomically. Only its owner, and who could read the old key, can ever read the key file.

    It must be new until it has its place: in a directory of several users another one could have made it, to read what comes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, content, mode, widest in (
        (directory / f"{stem}.key", secret, 0o600, 0o640),
        (directory / f"{stem}.pem", certificate.public_bytes(Encoding.PEM), 0o644, 0o644),
    ):
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                problem = _keep_access(descriptor, path, widest)
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        if problem:
            click.echo(f"ferrorpc: {problem}", err=True)


def _keep_access(descriptor: int, path: Path, widest: int) -> str:
    """Gives a new file the owner, the group and at most `widest` of the mode of the one that it will replace, if there is one.

    So services of other users can read what root renews. Not in a directory that others may write to: one of them could have
    made the old file, to be given the new key. Returns what is wrong where they are not kept, and what to try.
    """
    if not path.exists():
        return ""
    old, new, where = path.stat(), os.fstat(descriptor), path.parent
    mode, reason, then = old.st_mode & widest, "", ""
    if where.stat().st_mode & _OTHERS_WRITE:
        reason = f"others may write to {where}, so they could have made the old file"
        then = f"; `chmod go-w {where}` before the next time"
    else:
        try:
            if old.st_gid != new.st_gid:
                os.fchown(descriptor, -1, old.st_gid)
            os.fchmod(descriptor, mode)  # only now: it may let the group read
            if old.st_uid != new.st_uid:
                os.fchown(descriptor, old.st_uid, -1)
        except OSError as error:
            reason = str(error.strerror)
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid, new.st_mode & 0o777) == (old.st_uid, old.st_gid, mode):
        return ""
    return (
        f"{path} does not have the owner, group and mode of the file that it replaces, so its readers may be shut out: {reason}"
        f"\ntry: `chown {old.st_uid}:{old.st_gid} {path} && chmod {mode:o} {path}`, as a user who may{then}"
    )
