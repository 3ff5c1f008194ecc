"""Access control: by the client's certificate, by the token in its request, or by both.

Each that is given must be valid and have the needed role. If the coordinator has tokens, a client must give a token or a
certificate.

    read a job's status (Status)                                          observer
    take part (Session, Store, Barrier; Report of a process's exit)       worker
    remove a member (Report of a removal)                                 admin
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from typing import Final

from ferrorpc.errors import AuthenticationError, ConfigError, PermissionDeniedError
from ferrorpc.v1 import session_pb2
from ferrorpc.wire.identity import EVERY_JOB, Identity, Role, compared, described
from ferrorpc.wire.refusal_log import quoted
from ferrorpc_coordinator.state.events import Caller, UnaryRequest

TOKEN_CHARACTERS_MIN, TOKEN_CHARACTERS_MAX = 16, 4096

_COMMENT: Final = re.compile(r"(?<!\S)#.*")


@dataclass(frozen=True, slots=True)
class Grant:
    """A token, and the role that it grants."""

    token: str = field(repr=False)
    identity: Identity


def read_grants(text: str) -> tuple[Grant, ...]:
    """Parses a token file: one token for everything, or lines "ROLE TOKEN" and "ROLE@JOB TOKEN". "#" begins a comment, but not
    within a token.

    Raises:
        ConfigError: an invalid line, an unknown role, a token that is too short or listed twice. The message contains no token.
    """
    lines = [words for line in text.splitlines() if (words := _COMMENT.sub("", line).split())]
    if len(lines) == 1 and len(lines[0]) == 1 and lines[0][0].partition("@")[0] not in set(Role):
        lines = [[Role.ADMIN, *lines[0]]]  # else the token was forgotten, or is not written yet
    grants = tuple(_grant(number, words) for number, words in enumerate(lines, 1))
    if not grants:
        raise ConfigError("the token file is empty", hint=_CREATE_TOKEN_HINT)
    if len({grant.token for grant in grants}) < len(grants):
        raise ConfigError("the token file lists one token twice", hint="give each role a token of its own")
    return grants


_CREATE_TOKEN_HINT = 'make one with `python -c "import secrets; print(secrets.token_hex(32))"`'


_REPLACE_TOKEN_HINT = (
    "put a token of the coordinator's list into FERRORPC_TOKEN_FILE; to replace one, list the new one beside it, put that into "
    "every member's file, and only then take the old one off the list"
)


def _grant(number: int, words: list[str]) -> Grant:
    role, _, job = words[0].partition("@")
    if len(words) != 2 or role not in (Role.OBSERVER, Role.WORKER, Role.ADMIN):
        raise ConfigError(
            f"entry {number} of the token file is not ROLE TOKEN or ROLE@JOB TOKEN",
            hint="roles are observer, worker and admin",
        )
    if not TOKEN_CHARACTERS_MIN <= len(words[1]) <= TOKEN_CHARACTERS_MAX:
        raise ConfigError(
            f"the token of entry {number} has {len(words[1])} characters; "
            f"it needs {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX}",
            hint=_CREATE_TOKEN_HINT,
        )
    return Grant(words[1], Identity.of(job or EVERY_JOB, Role(role)))


class Access:
    """The access rules of one coordinator. Without tokens and certificates, everybody may do everything."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self._grants = grants

    def replace(self, grants: tuple[Grant, ...]) -> bool:
        """Replaces the tokens; returns whether they differ. Open sessions stay open."""
        before, self._grants = self._grants, grants
        return before != grants

    def check(self, caller: Caller, token: str, job: str, needed: Role) -> None:
        """Checks that a caller with this token has the needed role in `job`.

        Raises:
            AuthenticationError: the token is wrong or missing, or the certificate names no ferrorpc identity.
            PermissionDeniedError: they are valid, but for another job or a lesser role.
        """
        if caller.identities is not None:
            if not caller.identities:
                raise AuthenticationError(
                    "the certificate has no URI ferrorpc://JOB/ROLE", hint="issue it with `ferrorpc certs issue`"
                )
            _require_role(caller.identities, "certificate", job, needed)
        if not self._grants or (not token and caller.identities is not None):
            return
        found = self._find(token)
        if found is None:
            raise AuthenticationError(
                "the token is not one of this coordinator's" if token else "this coordinator needs a token, and none was given",
                hint=_REPLACE_TOKEN_HINT if token else None,
            )
        _require_role(frozenset({found}), "token", job, needed)

    def may_observe(self, caller: Caller, token: str, job: str) -> bool:
        """Whether a caller with this token may read the status of a job."""
        try:
            self.check(caller, token, job, Role.OBSERVER)
        except (AuthenticationError, PermissionDeniedError):
            return False
        return True

    def observes_all_jobs(self, token: str) -> bool:
        """Whether a token may read the status of every job."""
        found = self._find(token)
        return found is not None and found.job == EVERY_JOB

    @property
    def requires_token(self) -> bool:
        """Whether tokens are configured."""
        return bool(self._grants)

    def _find(self, token: str) -> Identity | None:
        """Compares with every token in constant time, so that the duration reveals nothing."""
        given, found = token.encode("utf-8", "replace"), None
        for grant in self._grants:
            if hmac.compare_digest(grant.token.encode(), given):
                found = grant.identity
        return found


def _require_role(found: frozenset[Identity], what: str, job: str, needed: Role) -> None:
    here = [one for one in found if one.covers(job)]
    if not here:
        wanted = f"job {quoted(job)}" if what == "token" else compared(job)
        raise PermissionDeniedError(f"the {what} is that of {described(found)}, not of {wanted}")
    if not any(one.role.may(needed) for one in here):
        raise PermissionDeniedError(f"the {what} is that of {described(here)}; this needs the role {needed}")


def required_role(request: UnaryRequest) -> Role:
    """The role that a unary request needs."""
    if isinstance(request, session_pb2.StatusRequest):
        return Role.OBSERVER
    if isinstance(request, session_pb2.UnaryReportRequest) and request.request.HasField("removal"):
        return Role.ADMIN
    return Role.WORKER
