"""The errors that end a generation, in the words that the coordinator and a world in one process share."""

from __future__ import annotations

import os
from typing import Final

from ferrorpc.errors import (
    CollectiveTimeoutError,
    ErrorCode,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
    StaleGenerationError,
    UsageError,
)

REFORMED_HINT: Final = (
    "use the group that reform() returned, and make again what belonged to this one: subgroups, wrapped modules, pipelines"
)
SPAWN_HINT: Final = (
    "start a process that is to join with the spawn method (multiprocessing.get_context('spawn')), or before "
    "init_process_group(); and without a launcher's variables, which give it its parent's place"
)
NOT_REACHED: Final = "it could not be reached"
"""Begins the reason of a lost link that never was: a peer that has left answers no dial."""
PEER_LEFT: Final = ""
"""The reason of a lost link whose peer has said goodbye: it has left, or is about to, and an operation still needs it."""
_RANK_FIELDS: Final = frozenset(("rank", "signatures"))
"""Fields of errors that name ranks."""


def error_on_rank(rank: int, origin: int, cause: FerroError) -> FerroError:
    """What `rank` raises when rank `origin` (-1: no rank) ended the generation with `cause`.

    All ranks raise the first cause, with one exception: a collective's timeout is raised only on the rank whose deadline
    passed; the others raise GroupAbortedError. A cause that names no rank names `origin` on the others, and a
    GroupAbortedError without a rank does so everywhere.
    """
    if origin == -1 or (origin == rank and not isinstance(cause, GroupAbortedError)):
        return cause
    if isinstance(cause, CollectiveTimeoutError):
        return GroupAbortedError(origin, cause.message)
    if not cause.fields.keys() & _RANK_FIELDS:
        message, fields = f"rank {origin} ended the group: {cause.message}", {**cause.fields, "rank": origin}
        return FerroError.restore(cause.code, message, cause.hint, cause.retryable, fields)
    return cause


def is_interrupt(error: BaseException) -> bool:
    """Whether it ends from outside what a thread does: Ctrl-C, or what else a signal handler raises that is no Exception, such
    as the time limit of a test runner. Not a SystemExit: that ends the process, of which the others hear anyway."""
    return not isinstance(error, Exception | SystemExit)


def reason_of(error: BaseException) -> str:
    """An exception as the other ranks see it: "ValueError: no such file". Of several, as asyncio.TaskGroup raises them, the
    first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        first_line = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001  the user's class may raise anything, which must not take the place of its own error
        first_line = ""
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def ended_by(cause: str, hint: str = GroupAbortedError.default_hint) -> FerroError:
    """A GroupAbortedError without the rank that reports it, which `error_on_rank` adds."""
    return FerroError.restore(ErrorCode.GROUP_ABORTED, cause, hint, GroupAbortedError.default_retryable, {"cause": cause})


def describe_lost_link(reason: str) -> str:
    """What a lost link's reason says of the peer, to follow its name in an explanation."""
    return "it said goodbye" if reason == PEER_LEFT else f"its link was lost: {reason}"


def link_lost(reporter: int, peer: int, reason: str) -> FerroError:
    """The data stream between two ranks broke, and both ranks are alive; or the peer has ended it in order to leave."""
    if reason == PEER_LEFT:
        return member_left(peer, reason)
    return GroupAbortedError(
        reporter,
        f"the data stream between rank {reporter} and rank {peer} broke: {reason}; both are alive",
        hint="look at the network between the two hosts; group.reform() connects anew",
    )


def links_closed(rank: int) -> GroupClosedError:
    """An operation goes on, or begins, on a rank that another call has taken out of the generation."""
    return GroupClosedError(
        f"rank {rank} has closed its links, by close() or reform()",
        hint="let other threads and asynchronous operations end before that; after reform() use the group that it returned",
    )


def already_reforming(peer: int, needed_by: str) -> GroupAbortedError:
    """An operation or a barrier needs a rank that has closed its data streams for the next generation."""
    return GroupAbortedError(
        peer,
        f"it called reform() already, and {needed_by} still needs it",
        hint="make every rank call reform() after the same operations, or after an error of the group",
    )


def generation_replaced(generation: int, by: int) -> StaleGenerationError:
    """All ranks went on to a later generation. Not retryable: another `reform` brings nothing of this one back."""
    return StaleGenerationError(f"generation {generation} was replaced by generation {by}", hint=REFORMED_HINT, retryable=False)


def used_in_child() -> UsageError:
    """A child that was forked from a member uses what belongs to its parent."""
    return UsageError(
        f"this process ({os.getpid()}) was forked from a member; a session does not survive a fork",
        hint=SPAWN_HINT,
    )


def member_left(peer: int, reason: str) -> PeerLostError:
    """An operation needs a rank that has left the job. `reason` is that of its lost link."""
    message = f"rank {peer} was lost: it left the job, and an operation here still needs it"
    hint = "make all ranks call the same operations (for loops of different lengths: `uneven()`), and close() after the last"
    is_link_lost = reason != PEER_LEFT and not reason.startswith(NOT_REACHED)
    if is_link_lost:
        message = f"{message}; its link was lost before: {reason}"
    network = ", and at the network between the two hosts" if is_link_lost else ", which may have ended too soon"
    hint = f"look at the log of rank {peer}{network}; or {hint}"
    return PeerLostError(peer, "it left the job", message, hint=hint)
