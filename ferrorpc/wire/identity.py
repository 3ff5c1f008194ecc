"""The identity that a certificate or token proves: a role in a job.

A certificate contains it as a URI in its subject alternative names, `ferrorpc://JOB/ROLE`, where `*` for JOB means every job. A
server's certificate also contains the DNS name `JOB.ROLE.ferrorpc`, and clients verify that name instead of the host's. So both
ends of a connection know the job and role of the other, and certificates need not name hosts, which change with every pod.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ferrorpc.wire.refusal_log import quoted

SCHEME: Final = "ferrorpc://"
EVERY_JOB: Final = "*"
_PLAIN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_HASHED: Final = "x--"
"""Prefix of the label of a job whose name is no valid DNS label. Names that begin with it are hashed as well."""


class Role(StrEnum):
    """What a process may do. Each of the first three may also do what those before it may do."""

    OBSERVER = "observer"
    """Read the status."""
    WORKER = "worker"
    """Take part: join, use the store and barriers, report exits of processes; serve peers."""
    ADMIN = "admin"
    """Remove members."""
    COORDINATOR = "coordinator"
    """Be the coordinator of the job."""

    def may(self, needed: Role) -> bool:
        """Whether this role may do what the needed role may do."""
        ladder = (Role.OBSERVER, Role.WORKER, Role.ADMIN)
        return self in ladder and needed in ladder and ladder.index(self) >= ladder.index(needed)


def label(job: str) -> str:
    """The job as it is written in certificates: its name, or a hash where the name is no valid DNS label."""
    if _PLAIN.fullmatch(job) and not job.startswith(_HASHED):
        return job
    return _HASHED + hashlib.sha256(job.encode("utf-8", "replace")).hexdigest()[:32]


def compared(job: str) -> str:
    """Text for messages about certificates: the job of this name, with its hash, where it has one, to compare with theirs."""
    return f"job {quoted(job)}" + (f" (its hash is {label(job)})" if label(job) != job else "")


def server_name(job: str, role: Role) -> str:
    """The DNS name in the certificate of a server with this role in the job of this name; a wildcard for EVERY_JOB."""
    return Identity.of(job, role).server_name


@dataclass(frozen=True, slots=True)
class Identity:
    """A role in a job. `job` is its label (see `label`), or EVERY_JOB; `name` is its name for messages, where known."""

    job: str
    role: Role
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.job == EVERY_JOB:
            return f"{self.role} of every job"
        is_hash = not self.name and self.job.startswith(_HASHED)
        return f"{self.role} of {'the job with the hash' if is_hash else 'job'} {self.name or self.job}"

    @classmethod
    def of(cls, job: str, role: Role) -> Identity:
        """The identity of a role in the job of this name; EVERY_JOB stands for every job."""
        return cls(EVERY_JOB if job == EVERY_JOB else label(job), role, job)

    @property
    def uri(self) -> str:
        """The URI in a certificate."""
        return f"{SCHEME}{self.job}/{self.role}"

    @property
    def server_name(self) -> str:
        """The DNS name in a server's certificate; a wildcard for EVERY_JOB."""
        return f"{self.job}.{self.role}.ferrorpc"

    def covers(self, job: str) -> bool:
        """Whether it is valid for the job of this name."""
        return self.job in (EVERY_JOB, label(job))


def identities(uris: Iterable[str]) -> frozenset[Identity]:
    """The identities in the URIs of a certificate. Other URIs are ignored."""
    found = set()
    for uri in uris:
        job, _, role = uri.removeprefix(SCHEME).partition("/")
        if uri.startswith(SCHEME) and job and role in set(Role):
            found.add(Identity(job, Role(role)))
    return frozenset(found)


def peer_identities(context: Mapping[str, Iterable[bytes]]) -> frozenset[Identity] | None:
    """The identities of the other end of a call, from gRPC's `auth_context`; None without a verified certificate."""
    if "x509_pem_cert" not in context:
        return None
    return identities(uri.decode("utf-8", "replace") for uri in context.get("peer_uri", ()))


def described(found: Iterable[Identity]) -> str:
    """Text for messages, such as "worker of job a"."""
    return " and ".join(sorted(map(str, found))) or "nobody that ferrorpc knows (no URI ferrorpc://JOB/ROLE)"
