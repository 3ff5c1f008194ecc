"""From the first cause of a generation's end to what each of its ranks raises."""

from __future__ import annotations

from typing import Final

from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, PeerLostError, StaleGenerationError

REFORMED_HINT: Final = (
    "use the group that reform() returned, and make again what belonged to this one: subgroups, wrapped modules, pipelines"
)
"""For whoever goes on with a group that was formed again."""
_WHOSE: Final = frozenset(("rank", "signatures"))
"""Fields of causes that name ranks."""


def cause_on(rank: int, origin: int, cause: FerroError) -> FerroError:
    """What `rank` raises when `origin` (-1 for nobody) ended the generation with `cause`.

    All ranks raise the same first cause, with one exception: only the rank whose deadline passed has timed out. The others
    were ended by it. Where the cause does not say whose it is, a note on the error does.
    """
    if origin in (-1, rank):
        return cause
    if isinstance(cause, CollectiveTimeoutError):
        return GroupAbortedError(origin, cause.message)
    if not cause.fields.keys() & _WHOSE:
        cause = cause.again()
        cause.add_note(f"(this happened on rank {origin} and ended the generation)")
    return cause


def link_lost(reporter: int, peer: int, reason: str) -> GroupAbortedError:
    """The cause when the stream between two ranks that are both alive broke: nobody was lost, the link is to blame."""
    return GroupAbortedError(
        reporter,
        f"the data stream between rank {reporter} and rank {peer} broke: {reason}; both are alive",
        hint="look at the network between the two; group.reform() makes new streams",
    )


def reforms_already(reporter: int, peer: int) -> GroupAbortedError:
    """The cause when an operation needs a rank that has closed its lanes for the next generation."""
    return GroupAbortedError(
        peer,
        f"it called reform() already, and an operation of rank {reporter} still needs it",
        hint="make every rank call reform() after the same operations, or after an error of the group",
    )


def replaced(generation: int, by: int) -> StaleGenerationError:
    """The cause when all went on to the next generation."""
    return StaleGenerationError(f"generation {generation} was replaced by generation {by}", hint=REFORMED_HINT)


def needed_one_who_left(peer: int) -> PeerLostError:
    """The cause when an operation needs a rank that has said goodbye."""
    return PeerLostError(
        peer,
        "it left the job",
        f"rank {peer} was lost: it left the job, and an operation here still needs it",
        hint="make all ranks call the same operations (for loops of different lengths: `uneven()`), and close() after the last",
    )
