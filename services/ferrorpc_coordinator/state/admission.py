"""Admission of members: new sessions, resumed ones, and names that are in use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ferrorpc.config import VALID_NAME
from ferrorpc.errors import ConfigError, LimitExceededError, MessageTooLargeError, StaleGenerationError, require
from ferrorpc.v1 import session_pb2
from ferrorpc.wire.refusal_log import quoted
from ferrorpc_coordinator.state.context import JobContext
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.members import Members
from ferrorpc_coordinator.state.settings import MILLISECOND, Limits, format_seconds


def check_name(what: str, name: str, most: int) -> None:
    """Checks a name, which becomes part of journal keys.

    Raises:
        ConfigError: it is empty, or contains anything but printable ASCII without blanks and slashes.
        LimitExceededError: it is too long.
    """
    if len(name.encode("utf-8", "replace")) > most:
        raise LimitExceededError(f"the {what} {name[:32]!r}... is longer than name_bytes, which is {most}", limit="name_bytes")
    if not VALID_NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r} is not made of printable ASCII without blanks and slashes", hint="choose another")


def check_hello(hello: session_pb2.Hello, limits: Limits) -> None:
    """Checks what does not depend on the job.

    Raises:
        ConfigError: the member's name is invalid, or its host or address has unprintable characters.
        LimitExceededError: its name or the whole Hello is too large.
    """
    check_name("member name", hello.name, limits.name_bytes)
    for what, text in (("host", hello.host), ("address", hello.address)):
        if not text.isprintable():  # the other members' errors contain them
            raise ConfigError(f"the {what} of member {hello.name} is {quoted(text)}", hint="a host's name is printable text")
    require("bytes of a Hello", hello.ByteSize(), "hello_bytes", limits.hello_bytes, MessageTooLargeError)


def unknown_session(hello: session_pb2.Hello) -> StaleGenerationError:
    """The error for a resume token that this coordinator does not know."""
    return StaleGenerationError(
        f"no session of {hello.name!r} in job {hello.job} has this token: another process took over its name, "
        "or this coordinator started without its journal"
    )


def hashed(token: str) -> bytes:
    """The hash of a resume token, which is stored in its place."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True)
class Admitted:
    """A Hello that was accepted."""

    member: Member
    token: str
    resumed: bool
    replaced: Member | None = None
    """The process that had the name before, and must be declared dead."""


class Admission:
    """Decides about a valid Hello. It changes nothing but a resumed member's token."""

    def __init__(self, context: JobContext, members: Members) -> None:
        self._context = context
        self._members = members

    def admit(self, hello: session_pb2.Hello) -> Admitted:
        """The member of this stream.

        Raises:
            StaleGenerationError: the session to resume is over.
            ConfigError: the name belongs to a living process (retryable).
            LimitExceededError: too many members.
        """
        if hello.resume_token:
            return self._resume(hello)
        before = self._members.get(hello.name)
        holder = before if before is not None and before.alive else None
        if holder is not None and holder.instance_id == hello.instance_id != "":
            # One that has a rank got its Welcome, and was at another cluster since: its generation there is another.
            return self._reissue_token(holder) if holder.rank < 0 else self._new(hello, before, holder)
        if holder is not None and (holder.recovered or holder.liveness is not Liveness.SUSPECT):
            silent = format_seconds(max(0, self._context.now - holder.last_heard))
            where = f" on {holder.host}" if holder.host else ""
            raise ConfigError(
                f"the name {hello.name!r} in job {self._context.job} is used by "
                + (
                    f"a process{where} that has not come back since the coordinator restarted"
                    if holder.recovered
                    else f"a living process{where}, heard of {silent} ago"
                ),
                hint="give every process its own FERRORPC_NAME (launchers: --node-rank); start what is no rank, such as a "
                "rank's subprocess, without the launcher's variables; or wait until the other one ends",
                retryable=True,
                holder=str(holder),
                incarnation=holder.incarnation,
            )
        living = self._members.living + (holder is None)  # a replacement takes the place of one that lives
        require(f"members of job {self._context.job}", living, "members", self._context.limits.members)
        return self._new(hello, before, holder)

    def _resume(self, hello: session_pb2.Hello) -> Admitted:
        member = self._members.get(hello.name)
        if member is None or member.token_hash != hashed(hello.resume_token):
            raise unknown_session(hello)
        if not member.alive:
            raise StaleGenerationError(f"the session of {member} is over: {member.reason or 'it left the job'}")
        return Admitted(member, hello.resume_token, resumed=True)

    def _reissue_token(self, member: Member) -> Admitted:
        """The same process sends its Hello again, since its Welcome was lost: gives it a new token."""
        token = self._context.shared.mint()
        member.token_hash = hashed(token)
        self._members.save(member)
        return Admitted(member, token, resumed=True)

    def _new(self, hello: session_pb2.Hello, before: Member | None, replaced: Member | None) -> Admitted:
        token = self._context.shared.mint()
        member = Member(
            name=hello.name,
            incarnation=1 if before is None else before.incarnation + 1,
            instance_id=hello.instance_id,
            token_hash=hashed(token),
            lease_ns=self._context.settings.granted_lease_ns(hello.lease_ms * MILLISECOND),
            host=hello.host,
            address=hello.address,
            labels={label.name: label.value for label in hello.labels},
            last_rank=-1 if before is None else before.last_rank,
            successor_of="" if before is None else before.launch,
            step_since=self._context.now,
        )
        return Admitted(member, token, resumed=False, replaced=replaced)
