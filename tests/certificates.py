"""Certificates for tests, made as `ferrorpc certs` makes them."""

from __future__ import annotations

import datetime
from pathlib import Path

from ferrorpc.wire.identity import Identity, Role
from ferrorpc.wire.tls import TlsFiles

DAY = datetime.timedelta(days=1)


class Issuer:
    """An authority in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        from ferrorpc.cli.authority import Authority  # needs a package that may be missing

        self.directory = directory
        self._authority = Authority.make(directory, 2)

    def issue(self, role: Role, job: str, *, lifetime: datetime.timedelta = DAY, where: str = "") -> TlsFiles:
        """A certificate of this role in a job. A negative `lifetime` makes one that has expired."""
        place = self.directory / (where or f"{role}-{job.replace('*', 'every')}")
        self._authority.issue(role, [Identity.of(job, role)], ["127.0.0.1"], lifetime, place)
        return TlsFiles(str(self.directory / "ca.pem"), str(place / f"{role}.pem"), str(place / f"{role}.key"))


def variables(files: TlsFiles) -> dict[str, str]:
    """The environment of a process that has these files."""
    found = {"CA": files.authority, "CERT": files.certificate, "KEY": files.key}
    return {f"FERRORPC_TLS_{name}": path for name, path in found.items() if path}


def settings(files: TlsFiles) -> dict[str, str]:
    """The same as settings."""
    return {name.removeprefix("FERRORPC_").lower(): path for name, path in variables(files).items()}
