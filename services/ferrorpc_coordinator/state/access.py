"""Who may do what: by the certificate that a connection was made with, by the token that a request brings, or by both.

Whatever is brought must be right and must permit; where anything is asked for, something must be brought.

    look at a job (Status)                                            observer
    take part (Session, Store, Barrier; Report of a process's exit)   worker
    remove a member (Report of a removal)                             admin
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from ferrorpc.errors import AuthenticationError, ConfigError, PermissionDeniedError
from ferrorpc.v1 import session_pb2
from ferrorpc.wire.identity import EVERY_JOB, Identity, Role, described
from ferrorpc.wire.refusal_log import quoted
from ferrorpc_coordinator.state.events import Caller, UnaryRequest

TOKEN_CHARACTERS_MIN, TOKEN_CHARACTERS_MAX = 16, 4096


@dataclass(frozen=True, slots=True)
class Grant:
    """A token, and who brings it."""

    token: str = field(repr=False)
    identity: Identity


def read_grants(text: str) -> tuple[Grant, ...]:
    """The tokens of a file: one alone, which may do everything; or lines "ROLE TOKEN" and "ROLE@JOB TOKEN". "#": a comment.

    Raises:
        ConfigError: a line that is neither, an unknown role, a token that is too short or given twice. It tells no token.
    """
    lines = [line.split() for line in (raw.partition("#")[0] for raw in text.splitlines()) if line.strip()]
    if len(lines) == 1 and len(lines[0]) == 1:
        lines = [[Role.ADMIN, *lines[0]]]
    grants = tuple(_grant(number, words) for number, words in enumerate(lines, 1))
    if not grants:
        raise ConfigError("the file of tokens is empty", hint=_MAKE_ONE)
    if len({grant.token for grant in grants}) < len(grants):
        raise ConfigError("the file of tokens has one token twice", hint="give each role a token of its own")
    return grants


_MAKE_ONE = 'make one with `python -c "import secrets; print(secrets.token_hex(32))"`'


_CHANGE_ONE = (
    "put a token of the coordinator's list into FERRORPC_TOKEN_FILE; to replace one, list the new one beside it, put that into "
    "every member's file, and only then take the old one off the list"
)


def _grant(number: int, words: list[str]) -> Grant:
    role, _, job = words[0].partition("@")
    if len(words) != 2 or role not in (Role.OBSERVER, Role.WORKER, Role.ADMIN):
        raise ConfigError(
            f"entry {number} of the file of tokens is not ROLE TOKEN or ROLE@JOB TOKEN",
            hint="roles are observer, worker and admin",
        )
    if not TOKEN_CHARACTERS_MIN <= len(words[1]) <= TOKEN_CHARACTERS_MAX:
        raise ConfigError(
            f"the token of entry {number} has {len(words[1])} characters; "
            f"it needs {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX}",
            hint=_MAKE_ONE,
        )
    return Grant(words[1], Identity.of(job or EVERY_JOB, Role(role)))


class Access:
    """Decides for one coordinator. No grants and no certificate: everybody may do everything."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self._grants = grants

    def replace(self, grants: tuple[Grant, ...]) -> bool:
        """From now on these count. Whether they are others than before; sessions that are open stay so."""
        before, self._grants = self._grants, grants
        return before != grants

    def check(self, caller: Caller, token: str, job: str, needed: Role) -> None:
        """Whether a caller with this token may do in `job` what needs a role.

        Raises:
            AuthenticationError: the token is wrong or missing, or the certificate says nothing that ferrorpc knows.
            PermissionDeniedError: they are somebody else's: of another job, or of a lesser role.
        """
        if caller.identities is not None:
            if not caller.identities:
                raise AuthenticationError(
                    "the certificate has no URI ferrorpc://JOB/ROLE", hint="issue it with `ferrorpc certs issue`"
                )
            _permit(caller.identities, "certificate", job, needed)
        if not self._grants or (not token and caller.identities is not None):
            return
        found = self._find(token)
        if found is None:
            raise AuthenticationError(
                "the token is not one of this coordinator"
                if token
                else "this coordinator asks for a token and none was brought",
                hint=_CHANGE_ONE if token else None,
            )
        _permit(frozenset({found}), "token", job, needed)

    def permits_a_look(self, caller: Caller, token: str, job: str) -> bool:
        """Whether a caller with this token may know of a job."""
        try:
            self.check(caller, token, job, Role.OBSERVER)
        except (AuthenticationError, PermissionDeniedError):
            return False
        return True

    def sees_every_job(self, token: str) -> bool:
        """Whether a token lets its bearer look at all there is."""
        found = self._find(token)
        return found is not None and found.job == EVERY_JOB

    @property
    def asks_for_tokens(self) -> bool:
        """Whether there are tokens at all."""
        return bool(self._grants)

    def _find(self, token: str) -> Identity | None:
        """Compares with every token, each in constant time, so that how long it takes tells nothing."""
        given, found = token.encode("utf-8", "replace"), None
        for grant in self._grants:
            if hmac.compare_digest(grant.token.encode(), given):
                found = grant.identity
        return found


def _permit(found: frozenset[Identity], what: str, job: str, needed: Role) -> None:
    here = [one for one in found if one.covers(job)]
    if not here:
        raise PermissionDeniedError(f"the {what} is that of {described(found)}, and has no part in job {quoted(job)}")
    if not any(one.role.may(needed) for one in here):
        raise PermissionDeniedError(f"the {what} is that of {described(here)}; this takes the role {needed}")


def needed_for(request: UnaryRequest) -> Role:
    """The role that a unary request takes."""
    if isinstance(request, session_pb2.StatusRequest):
        return Role.OBSERVER
    if isinstance(request, session_pb2.UnaryReportRequest) and request.request.HasField("removal"):
        return Role.ADMIN
    return Role.WORKER
