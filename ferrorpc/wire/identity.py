"""Who a certificate or a token speaks for: a role in a job.

A certificate says it in a SAN of kind URI, `ferrorpc://JOB/ROLE`; `*` for JOB is every job. What listens has a DNS name of the
same meaning, `JOB.ROLE.ferrorpc`, and whoever dials asks for that name instead of the host's. So both ends of a connection
know the other's job and role, and certificates need not name hosts, which change with every pod.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SCHEME: Final = "ferrorpc://"
EVERY_JOB: Final = "*"
_PLAIN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_HASHED: Final = "x--"
"""Begins the label of a job whose name is no label of DNS. A name that begins so is hashed as well."""


class Role(StrEnum):
    """What somebody may do; each of the first three may do what those before it may."""

    OBSERVER = "observer"
    """Look."""
    WORKER = "worker"
    """Take part: join, use the store and barriers, report the end of processes; listen to peers."""
    ADMIN = "admin"
    """Remove members."""
    COORDINATOR = "coordinator"
    """Answer as the job's coordinator."""

    def may(self, needed: Role) -> bool:
        """Whether this role may do what needs that one."""
        ladder = (Role.OBSERVER, Role.WORKER, Role.ADMIN)
        return self in ladder and needed in ladder and ladder.index(self) >= ladder.index(needed)


def label(job: str) -> str:
    """The job as certificates write it: its name, or a hash where that cannot be part of a DNS name."""
    if _PLAIN.fullmatch(job) and not job.startswith(_HASHED):
        return job
    return _HASHED + hashlib.sha256(job.encode("utf-8", "replace")).hexdigest()[:32]


def server_name(job: str, role: Role) -> str:
    """The DNS name that a listener of this role must have in its certificate; for EVERY_JOB a wildcard."""
    return f"{EVERY_JOB if job == EVERY_JOB else label(job)}.{role}.ferrorpc"


@dataclass(frozen=True, slots=True)
class Identity:
    """A role in a job, whose name is written as `label` does, or EVERY_JOB."""

    job: str
    role: Role

    def __str__(self) -> str:
        return f"{self.role} of {'every job' if self.job == EVERY_JOB else f'job {self.job}'}"

    @classmethod
    def of(cls, job: str, role: Role) -> Identity:
        """In the job of this name; EVERY_JOB is every job."""
        return cls(EVERY_JOB if job == EVERY_JOB else label(job), role)

    @property
    def uri(self) -> str:
        """As a certificate says it."""
        return f"{SCHEME}{self.job}/{self.role}"

    def covers(self, job: str) -> bool:
        """Whether it says anything about the job of this name."""
        return self.job in (EVERY_JOB, label(job))


def identities(uris: Iterable[str]) -> frozenset[Identity]:
    """What the URIs of a certificate say; those that are none of ours say nothing."""
    found = set()
    for uri in uris:
        job, _, role = uri.removeprefix(SCHEME).partition("/")
        if uri.startswith(SCHEME) and job and role in set(Role):
            found.add(Identity(job, Role(role)))
    return frozenset(found)


def peer_identities(context: Mapping[str, Iterable[bytes]]) -> frozenset[Identity] | None:
    """Of whoever is at the other end of a call, from gRPC's `auth_context`; None without a verified certificate."""
    if "x509_pem_cert" not in context:
        return None
    return identities(uri.decode("utf-8", "replace") for uri in context.get("peer_uri", ()))


def described(found: Iterable[Identity]) -> str:
    """For messages: "worker of job a"."""
    return " and ".join(sorted(map(str, found))) or "nobody that ferrorpc knows (no URI ferrorpc://JOB/ROLE)"
